"""The protobuf messages of the training API, with the fields, in the order of their numbers, that release 0.38 of the
`tinker` client writes and reads.

The classes are made in a descriptor pool of their own: a process may have the client's classes, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from torch import Tensor

from lockstep.errors import UserError

PACKAGE = "lockstep.train_server"
CONTENT_TYPE = "application/x-protobuf"
FIELDS = {
    "SparseCsr": "values:bytes crow_indices:bytes col_indices:bytes",
    "Tensor": "dense:bytes sparse_csr:SparseCsr dtype:int32 shape:int64*",
    "BatchedTensor": "data:bytes offsets:bytes dtype:int32 trailing_shape:int64*",
    "ArrayRecord": "type_tag:string fields:BatchedTensor@ num_datums:int64",
    "ForwardBackwardOutput": "loss_fn_output_type:string loss_fn_outputs:ArrayRecord* metrics:double@",
    "EncodedTextChunk": "tokens:bytes",
    "ImageChunk": "data:bytes format:string",
    "DmelChunk": "dmel:bytes",
    "Chunk": "encoded_text:EncodedTextChunk image:ImageChunk dmel:DmelChunk",
    "TokenSpan": "sequence_id:string offset:int64 length:int64",
    "ProvenanceSpan": "prompt_tokens:TokenSpan sampled_tokens:TokenSpan",
    "Datum": "model_input:Chunk* loss_fn_inputs:Tensor@ model_input_spans:ProvenanceSpan* "
    "loss_fn_input_spans:ProvenanceSpan*",
    "LossConfigValue": "number:double text:string",
    "ForwardBackwardRequest": "model_id:string seq_id:int32 data:Datum* loss_fn:string loss_fn_config:double@ "
    "forward_only:bool loss_fn_config_v2:LossConfigValue@",
    "TopkLogprobs": "token_ids:bytes logprobs:bytes k:uint32 length:uint32",
    "SampledSequence": "stop_reason:int32 tokens:bytes logprobs:bytes topk_sampled_logprobs:TopkLogprobs",
    "SampleResponse": "sequences:SampledSequence* prompt_logprobs:bytes topk_prompt_logprobs:TopkLogprobs "
    "prompt_cache_hit_tokens:int32 target_prompt_logprobs:Tensor",
}
"""`name:type` of each message's fields; `*`: repeated, `@`: a map from strings."""
STOP, LENGTH = 0, 1
"""Why a sequence ended."""
FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
NUMPY: dict[int, np.dtype[Any]] = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8"), INT32: np.dtype("<i4")}
MOST_ELEMENTS, MOST_SIZES = 1 << 20, 4
"""Of a sparse tensor written out, which may name any shape in a few bytes; and sizes of a shape."""
_KINDS = descriptor_pb2.FieldDescriptorProto
_SCALARS = {"bytes": "TYPE_BYTES", "string": "TYPE_STRING", "int32": "TYPE_INT32", "int64": "TYPE_INT64"}
_SCALARS |= {"uint32": "TYPE_UINT32", "double": "TYPE_DOUBLE", "bool": "TYPE_BOOL"}


def _make_messages() -> Mapping[str, Any]:
    """The class of each message, by name."""
    file = descriptor_pb2.FileDescriptorProto(name="train_server.proto", package=PACKAGE, syntax="proto3")
    for name, fields in FIELDS.items():
        message = file.message_type.add(name=name)
        for number, spec in enumerate(fields.split(), 1):
            field, kind = spec.rstrip("*@").split(":")
            if not spec.endswith("@"):
                _add_field(message, field, number, kind, repeated=spec.endswith("*"))
                continue
            entry = message.nested_type.add(name="".join(part.title() for part in field.split("_")) + "Entry")
            entry.options.map_entry = True
            _add_field(entry, "key", 1, "string")
            _add_field(entry, "value", 2, kind)
            _add_field(message, field, number, f"{name}.{entry.name}", repeated=True)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in FIELDS}


def _add_field(message: Any, name: str, number: int, kind: str, repeated: bool = False) -> None:
    label = _KINDS.LABEL_REPEATED if repeated else _KINDS.LABEL_OPTIONAL
    field = message.field.add(name=name, number=number, label=label)
    if kind in _SCALARS:
        field.type = getattr(_KINDS, _SCALARS[kind])
    else:
        field.type, field.type_name = _KINDS.TYPE_MESSAGE, f".{PACKAGE}.{kind}"


MESSAGES = _make_messages()


def parsed(kind: str, data: bytes) -> Any:
    """The message in `data`. Raises UserError if it is not one."""
    message = MESSAGES[kind]()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise UserError(f"the body is not a {kind} in protobuf ({error})") from error
    return message


def tensor_of(message: Any, name: str) -> Tensor:
    """The tensor of a message, float32 or int64; entries that a sparse one does not list are 0.

    Raises UserError, with `name`, for a message that contradicts itself.
    """
    if message.dtype not in (FLOAT32, INT64):
        raise UserError(f"{name} has the data type {message.dtype}; send float32 ({FLOAT32}) or int64 ({INT64})")
    sparse = message.sparse_csr if message.HasField("sparse_csr") else None
    values = _numbers(message.dense if sparse is None else sparse.values, NUMPY[message.dtype], name)
    shape = tuple(message.shape)
    if len(shape) > MOST_SIZES or any(not 0 <= size <= MOST_ELEMENTS for size in shape):
        raise UserError(f"{name} has a shape of {len(shape)} sizes; send up to {MOST_SIZES}, of 0 to {MOST_ELEMENTS}")
    if sparse is not None:
        return _written_out(values, sparse, shape, name)
    shape = shape or (len(values),)
    if math.prod(shape) != len(values):
        raise UserError(f"{name} has {len(values)} numbers, but its shape is {list(shape)}")
    return torch.from_numpy(values.copy()).view(shape)


def _written_out(values: np.ndarray, sparse: Any, shape: tuple[int, ...], name: str) -> Tensor:
    rows, columns = (_numbers(each, NUMPY[INT64], name) for each in (sparse.crow_indices, sparse.col_indices))
    if len(shape) != 2 or math.prod(shape) > MOST_ELEMENTS:
        raise UserError(
            f"{name} is sparse with the shape {list(shape)}; send a matrix of up to {MOST_ELEMENTS} entries"
        )
    counts = np.diff(rows)
    consistent = len(rows) == shape[0] + 1 and rows[0] == 0 and rows[-1] == len(values) == len(columns)
    if not consistent or (counts < 0).any() or ((columns < 0) | (columns >= shape[1])).any():
        raise UserError(
            f"{name} is sparse, but its indices do not fit its {len(values)} values and shape {list(shape)}"
        )
    dense = np.zeros(shape, values.dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return torch.from_numpy(dense)


def _numbers(data: bytes, kind: np.dtype, name: str) -> np.ndarray:
    if len(data) % kind.itemsize:
        raise UserError(f"{name} has {len(data)} bytes, which are no whole numbers of {kind.itemsize} bytes")
    return np.frombuffer(data, kind)


def tokens_of(chunks: Any, name: str) -> list[int]:
    """The tokens of a model input. Raises UserError for anything but text."""
    tokens: list[int] = []
    for chunk in chunks:
        if not chunk.HasField("encoded_text"):
            kind = "an image" if chunk.HasField("image") else "audio" if chunk.HasField("dmel") else "an empty chunk"
            raise UserError(f"{name} contains {kind}; this server trains and samples text alone")
        tokens += _numbers(chunk.encoded_text.tokens, NUMPY[INT32], name).tolist()
    return tokens


def batched(tensors: list[Tensor]) -> Any:
    """One field of all data's outputs: float32 or int64 tensors that differ in their first size alone."""
    kind = FLOAT32 if tensors[0].dtype == torch.float32 else INT64
    arrays = [tensor.detach().contiguous().numpy().astype(NUMPY[kind], copy=False) for tensor in tensors]
    offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype=NUMPY[INT64])
    message = MESSAGES["BatchedTensor"](
        data=b"".join(a.tobytes() for a in arrays), offsets=offsets.tobytes(), dtype=kind
    )
    message.trailing_shape.extend(tensors[0].shape[1:])
    return message


def numbers(values: Any, kind: int) -> bytes:
    """The bytes of numbers."""
    return np.asarray(values, NUMPY[kind]).tobytes()
