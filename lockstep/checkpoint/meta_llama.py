"""Meta's original Llama 3 folders: `params.json` and `consolidated.*.pth`, sharded for tensor parallelism."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.model import ModelConfig, RopeScaling

# By Meta's name in a layer: our name, and the axis that it is sharded along (None: each file has the whole tensor).
LAYER_NAMES = {
    "attention.wq": ("self_attn.q_proj", 0),
    "attention.wk": ("self_attn.k_proj", 0),
    "attention.wv": ("self_attn.v_proj", 0),
    "attention.wo": ("self_attn.o_proj", 1),
    "feed_forward.w1": ("mlp.gate_proj", 0),
    "feed_forward.w2": ("mlp.down_proj", 1),
    "feed_forward.w3": ("mlp.up_proj", 0),
    "attention_norm": ("input_layernorm", None),
    "ffn_norm": ("post_attention_layernorm", None),
}
LLAMA_3_VOCABULARY = 128256
OURS = ("tok_embeddings.", "layers.", "norm.", "output.")
SIZES = ("dim", "n_layers", "n_heads")
OPTIONAL = ("norm_eps", "rope_theta", "rope_scaling_factor")


def open_meta_llama(
    folder: Path,
) -> tuple[ModelConfig, torch.dtype, dict[str, tuple[torch.Size, Callable[[], Tensor]]]]:
    """The model's config, dtype, and by Hugging Face name each tensor's shape and a function that reads it.

    The files are memory-mapped, and no code in them is run. Raises UserError, naming the file.
    """
    params = _params(folder / "params.json")
    paths = sorted(folder.glob("consolidated.*.pth"))
    if not paths:
        raise UserError(f"{folder}: has params.json but no consolidated.*.pth; the download may be incomplete")
    shards = [_load(path) for path in paths]
    if params["n_layers"] > len(shards[0]):
        raise UserError(
            f"{folder}: params.json has {params['n_layers']} layers, the files have fewer; download it again"
        )
    for path, shard in zip(paths, shards):
        if shard.keys() != shards[0].keys():
            raise UserError(f"{path}: has other tensors than {paths[0].name}; the files do not belong together")
    try:
        for name, tensor in ((name, tensor) for shard in shards for name, tensor in shard.items()):
            if name.startswith(OURS) and (tensor.ndim != (1 if "norm" in name else 2) or 0 in tensor.shape):
                raise UserError(f"{folder}: tensor {name} has the shape {list(tensor.shape)}; download it again")
        return _model(params, shards)
    except KeyError as error:
        raise UserError(f"{folder}: {error} is missing; this is not a complete Llama 3 folder from Meta") from error


def _model(
    params: dict[str, Any], shards: list[dict[str, Tensor]]
) -> tuple[ModelConfig, torch.dtype, dict[str, tuple[torch.Size, Callable[[], Tensor]]]]:
    first, count = shards[0], len(shards)
    dim, heads = params["dim"], params["n_heads"]
    kv_heads = params.get("n_kv_heads") or heads
    embedding = first["tok_embeddings.weight"]
    # Llama 3 shards the embedding by tokens, Llama 2 by columns.
    embedding_axis = 0 if embedding.shape[1] == dim else 1
    head = [shard.get("output.weight") for shard in shards]
    tied = head[0] is None or all(
        torch.equal(part, shard["tok_embeddings.weight"]) for part, shard in zip(head, shards) if part is not None
    )
    vocabulary = embedding.shape[0] * (count if embedding_axis == 0 else 1)
    config = ModelConfig(
        family="llama3",
        vocab_size=vocabulary,
        dim=dim,
        num_layers=params["n_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim // heads,
        intermediate_size=first["layers.0.feed_forward.w1.weight"].shape[0] * count,
        norm_eps=params.get("norm_eps", 1e-5),
        rope_theta=params.get("rope_theta", 10000.0),
        rope_scaling=_rope_scaling(params, tied),
        max_positions=131072 if params.get("use_scaled_rope") else 8192,
        tie_embeddings=tied,
        bos_token_id=128000 if vocabulary == LLAMA_3_VOCABULARY else None,
        eos_token_ids=(128001, 128008, 128009) if vocabulary == LLAMA_3_VOCABULARY else (),
    )
    places: dict[str, tuple[str, int | None, int]] = {
        "model.embed_tokens.weight": ("tok_embeddings.weight", embedding_axis, 0),
        "model.norm.weight": ("norm.weight", None, 0),
    }
    if not tied:
        places["lm_head.weight"] = ("output.weight", 0, 0)
    rotated = {"attention.wq": heads, "attention.wk": kv_heads}
    for layer in range(config.num_layers):
        for meta, (ours, axis) in LAYER_NAMES.items():
            name = f"layers.{layer}.{meta}.weight"
            places[f"model.layers.{layer}.{ours}.weight"] = (name, axis, rotated.get(meta, 0))
    tensors: dict[str, tuple[torch.Size, Callable[[], Tensor]]] = {}
    for name, (meta, axis, rotated_heads) in places.items():
        parts = [shard[meta] for shard in shards]
        shape = list(parts[0].shape)
        alike = {part.shape[:axis] + part.shape[axis + 1 :] if axis is not None else part.shape for part in parts}
        rows = sum(part.shape[0] for part in parts)
        if len(alike) > 1 or (rotated_heads and rows % (2 * rotated_heads)):
            raise UserError(f"tensor {meta} has shapes that do not fit each other or the heads; download it again")
        if axis is not None:
            shape[axis] = sum(part.shape[axis] for part in parts)
        tensors[name] = (torch.Size(shape), partial(_whole, parts, axis, rotated_heads))
    return config, embedding.dtype, tensors


def _rope_scaling(params: dict[str, Any], tied: bool) -> RopeScaling | None:
    """params.json says whether frequencies are scaled, rarely the factor: 8 in Llama 3.1, 32 in the small, tied 3.2."""
    if not params.get("use_scaled_rope"):
        return None
    return RopeScaling(params.get("rope_scaling_factor") or (32.0 if tied else 8.0), 1.0, 4.0, 8192)


def _whole(parts: list[Tensor], axis: int | None, rotated_heads: int) -> Tensor:
    whole = parts[0] if axis is None else torch.cat(parts, dim=axis)
    if rotated_heads == 0:
        return whole
    # Meta rotates neighboring rows (2i, 2i + 1) of a head; Hugging Face rows (i, i + head_dim / 2).
    pairs = whole.view(rotated_heads, -1, 2, whole.shape[1])
    return pairs.transpose(1, 2).reshape(whole.shape)


def _params(path: Path) -> dict[str, Any]:
    try:
        params = json.loads(path.read_text())
        wrong = [name for name in SIZES if not _is_size(params[name])]
        wrong += [name for name in OPTIONAL if params.get(name) is not None and not _is_number(params[name])]
        wrong += ["n_kv_heads"] if not _is_size(params.get("n_kv_heads") or 1) else []
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as Meta's parameters ({error!r}); download it again") from error
    if wrong:
        raise UserError(f"{path}: {wrong[0]} is {params[wrong[0]]!r:.100}, which is not valid; download it again")
    return dict(params)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e30


def _load(path: Path) -> dict[str, Tensor]:
    try:
        with zipfile.ZipFile(path) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("its parts are compressed, which torch never does")
        tensors = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except Exception as error:  # torch raises many kinds of errors here
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path}: cannot be read as plain tensors ({reason}); download it again") from error
    named = isinstance(tensors, dict) and all(isinstance(name, str) for name in tensors)
    if not named or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise UserError(f"{path}: contains more than tensors; give Meta's own files")
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("rope.")}
