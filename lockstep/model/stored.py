"""The names and layout of parameters in the files of a Hugging Face folder."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from lockstep.model.config import ModelConfig

EXPERTS = ".mlp.experts."
PROJECTIONS = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
FUSED = "gate_up_proj"
TRANSPOSED = ("gate_up_proj", "down_proj")
"""Weights of gpt-oss's experts, which are `[experts, in, out]` in files."""


UNGATED = {"mlp.up_proj.": "mlp.fc1.", "mlp.down_proj.": "mlp.fc2."}
"""Names in files of the projections of a feed-forward without a gate."""

PEFT_ROOT = "base_model.model."
"""Prefix of tensor names in an adapter's file: `peft` wraps the model."""
PEFT_PREFIX = f"{PEFT_ROOT}model."
"""Prefix of layer names in an adapter's file."""
HEADS = ("lm_head.", "score.")
_INSIDE = re.compile(r"^(?:model\.)?language_model\.(?:model\.)?")
"""Prefixes of the language model's tensors in models with a vision tower, of older and newer transformers."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SCORE = "score.weight"
NORM = re.compile(r"norm\.weight$")
CHOICE_BIAS = "e_score_correction_bias"


def is_adapter(name: str) -> bool:
    """Whether a parameter is part of a low-rank adapter."""
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


def is_score_head(name: str) -> bool:
    """Whether a parameter is the head of a reward model."""
    return name == SCORE


def is_saved_with_adapter(name: str) -> bool:
    """Whether a parameter is trained and saved with an adapter: the adapter's, and a reward model's head."""
    return is_adapter(name) or is_score_head(name)


def adapter_name(name: str, config: ModelConfig) -> str:
    """The name of a parameter that is not the base's in an adapter's file."""
    return f"{PEFT_ROOT}{name}" if is_score_head(name) else hugging_face_name(name, config)


def is_float32(name: str) -> bool:
    """Whether a parameter is float32 in a model of any dtype: the steps of a router's bias are below bfloat16's
    resolution."""
    return name.endswith(CHOICE_BIAS)


class Stored(NamedTuple):
    """A tensor in a file, and the place of a parameter's values in it."""

    name: str
    expert: int | None = None
    """The expert whose part of a stacked parameter the tensor is; None: the tensor has the whole parameter."""
    first_row: int = 0
    """The first row of this parameter in a tensor with the rows of several."""
    shape: tuple[int, ...] = ()
    """Shape of the tensor, if it has the rows of several parameters."""
    transposed: bool = False
    """Whether the parameter's last two dimensions are swapped in the tensor."""

    def of(self, parameter: Tensor) -> Tensor:
        """A view of the parameter with the tensor's layout."""
        if self.expert is not None:
            return parameter[self.expert]
        return parameter.mT if self.transposed else parameter

    def place(self, place: tuple[slice, ...]) -> tuple[slice, ...]:
        """The place in the tensor of a place in the parameter."""
        if self.expert is not None:
            return place[1:]
        if self.first_row:
            return place[0], slice(place[1].start + self.first_row, place[1].stop + self.first_row), place[2]
        return (*place[:-2], place[-1], place[-2]) if self.transposed else place

    def shape_for(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The tensor's shape, for a parameter of this shape."""
        if self.transposed:
            return (*shape[:-2], shape[-1], shape[-2])
        return self.shape or tuple(shape if self.expert is None else shape[1:])


def hugging_face_name(name: str, config: ModelConfig) -> str:
    """A parameter's name in a Hugging Face file: all but the head are under `model.`, and an adapter's parameters have
    `peft`'s names."""
    if not config.is_gated:
        for ours, theirs in UNGATED.items():
            name = name.replace(ours, theirs)
    if is_adapter(name):
        return f"{PEFT_ROOT if name.startswith(HEADS) else PEFT_PREFIX}{name}"
    return name if name.startswith(HEADS) else f"model.{name}"


def layer_in_file(layer: str, config: ModelConfig) -> str:
    """The name in an adapter's files of a layer such as `layers.0.mlp.up_proj`."""
    return hugging_face_name(f"{layer}.weight", config).removeprefix("model.").removesuffix(".weight")


def layer_of_file(layer: str) -> str:
    """The inverse of `layer_in_file`."""
    for ours, theirs in UNGATED.items():
        layer = f"{layer}.".replace(theirs, ours).removesuffix(".")
    return layer


def in_language_model(name: str) -> str:
    """The name of a file's tensor in the model with a head: transformers' classes without a head save their tensors
    without `model.`, and both load such files; those with a vision tower have the language model's under
    `language_model.`, and so have adapters for them."""
    root = PEFT_ROOT if name.startswith(PEFT_ROOT) else ""
    inner, inside = _INSIDE.subn("", name.removeprefix(root))
    if inside:
        return f"{root}{inner}" if inner.startswith(HEADS) else f"{root}model.{inner}"
    return f"model.{name}" if name.startswith(("embed_tokens.", "layers.", "norm.")) else name


def names_in_language_model(stored_names: Iterable[str]) -> dict[str, str]:
    """The tensors of a file by `in_language_model`, and their names there; those to which it gives the same name keep
    theirs."""
    names = {name: in_language_model(name) for name in stored_names}
    given = Counter(names.values())
    return {name if given[inner] > 1 else inner: name for name, inner in names.items()}


def is_of_language_model(stored_name: str) -> bool:
    """Whether a tensor in the files of a model with a vision tower belongs to its language model."""
    return stored_name.startswith(HEADS) or _INSIDE.match(stored_name) is not None


def stored_as(name: str, shape: Sequence[int], config: ModelConfig) -> list[Stored]:
    """The tensors as which a parameter is written: one per expert, as in Hugging Face's folders; none for norms without
    weights."""
    layer, _, projection = name.partition(EXPERTS)
    if config.plain_norms and NORM.search(name):
        return []
    if projection in TRANSPOSED:
        return [Stored(hugging_face_name(name, config), transposed=True)]
    if projection not in PROJECTIONS:
        return [Stored(hugging_face_name(name, config))]
    return [Stored(f"model.{layer}{EXPERTS}{expert}.{projection}", expert) for expert in range(shape[0])]


def read_as(name: str, shape: Sequence[int], stored: Collection[str], config: ModelConfig) -> list[Stored]:
    """The tensors from which a parameter is read: as `stored_as`, or stacked or fused if the `stored` names are; a
    tied embedding also from the head."""
    if is_score_head(name) and adapter_name(name, config) in stored:
        return [Stored(adapter_name(name, config))]
    written = stored_as(name, shape, config)
    if config.tie_embeddings and f"model.{name}" == EMBEDDING and EMBEDDING not in stored and HEAD in stored:
        return [Stored(HEAD)]
    layer, _, projection = name.partition(EXPERTS)
    if not written or written[0].expert is None or written[0].name in stored:
        return written
    kind = projection.removesuffix("_proj.weight")
    whole = f"model.{layer}{EXPERTS}{kind}_proj"
    if stacked := next((n for n in (whole, f"{whole}.weight") if n in stored), None):
        return [Stored(stacked)]
    fused = f"model.{layer}{EXPERTS}{FUSED}"
    if kind != "down" and fused in stored:
        experts, rows, columns = shape
        return [Stored(fused, first_row=0 if kind == "gate" else rows, shape=(experts, 2 * rows, columns))]
    return written
