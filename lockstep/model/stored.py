"""How a parameter is named and split in the files of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from torch import Tensor

from lockstep.model.mxfp4 import BLOCK, BLOCKS, SCALES

EXPERTS = ".mlp.experts."
PROJECTIONS = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
FUSED = "gate_up_proj"
TRANSPOSED = ("gate_up_proj", "down_proj")
"""Weights of gpt-oss's experts that are `[experts, in, out]` in files."""


PEFT_ROOT = "base_model.model."
"""Before a tensor's name in an adapter's file: `peft` wraps the model."""
PEFT_PREFIX = f"{PEFT_ROOT}model."
"""Before a layer's."""
HEADS = ("lm_head.", "score.")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SCORE = "score.weight"
CHOICE_BIAS = "e_score_correction_bias"


def is_adapter(name: str) -> bool:
    """Whether a parameter is one of a low-rank adapter's."""
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


def is_score_head(name: str) -> bool:
    """Whether a parameter is the head of a reward model."""
    return name == SCORE


def is_beside_base(name: str) -> bool:
    """Whether a parameter is trained and saved if there is an adapter: the adapter's, and a reward model's head."""
    return is_adapter(name) or is_score_head(name)


def adapter_name(name: str) -> str:
    """The name in an adapter's file of a parameter outside the base."""
    return f"{PEFT_ROOT}{name}" if is_score_head(name) else hugging_face_name(name)


def is_float32(name: str) -> bool:
    """Whether a parameter is float32 in a model of any dtype: a router's bias moves in steps below bfloat16's."""
    return name.endswith(CHOICE_BIAS)


class Stored(NamedTuple):
    """A tensor in a file, and where a parameter's values are in it."""

    name: str
    expert: int | None = None
    """The tensor is this expert's part of a parameter that stacks all experts'; None: it has the whole parameter."""
    first_row: int = 0
    """In a tensor with several parameters' rows, where this one's begin."""
    shape: tuple[int, ...] = ()
    """Shape of the tensor, if it has several parameters' rows."""
    transposed: bool = False
    """The parameter's last two dimensions are swapped in the tensor."""
    quantized: bool = False
    """The files have MXFP4 blocks and their scales instead of the tensor."""

    def of(self, parameter: Tensor) -> Tensor:
        """A parameter's values as the tensor has them; they share their memory."""
        if self.expert is not None:
            return parameter[self.expert]
        return parameter.mT if self.transposed else parameter

    def place(self, place: tuple[slice, ...]) -> tuple[slice, ...]:
        """Where in the tensor a place of the parameter is."""
        if self.expert is not None:
            return place[1:]
        if self.first_row:
            return place[0], slice(place[1].start + self.first_row, place[1].stop + self.first_row), place[2]
        return (*place[:-2], place[-1], place[-2]) if self.transposed else place

    def tensors(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """The names and shapes of what the files have, of a parameter's shape."""
        if self.quantized:
            experts, outputs, inputs = shape
            blocks = (experts, outputs, inputs // BLOCK)
            return {self.name + BLOCKS: (*blocks, BLOCK // 2), self.name + SCALES: blocks}
        if self.transposed:
            return {self.name: (*shape[:-2], shape[-1], shape[-2])}
        return {self.name: self.shape or tuple(shape if self.expert is None else shape[1:])}


def hugging_face_name(name: str) -> str:
    """A parameter's name in a Hugging Face file: everything but the head is under `model.`, and an adapter's
    parameters have `peft`'s names."""
    if is_adapter(name):
        return f"{PEFT_PREFIX}{name}"
    return name if name.startswith(HEADS) else f"model.{name}"


def in_language_model(name: str) -> str:
    """The name of a file's tensor under the model with a head: transformers' classes without one save their tensors
    without `model.`, and load such files into both."""
    return f"model.{name}" if name.startswith(("embed_tokens.", "layers.", "norm.")) else name


def stored_as(name: str, shape: Sequence[int]) -> list[Stored]:
    """The tensors that a parameter is written as: experts one by one, as Hugging Face's folders have them."""
    layer, _, projection = name.partition(EXPERTS)
    if projection in TRANSPOSED:
        return [Stored(hugging_face_name(name), transposed=True)]
    if projection not in PROJECTIONS:
        return [Stored(hugging_face_name(name))]
    return [Stored(f"model.{layer}{EXPERTS}{expert}.{projection}", expert) for expert in range(shape[0])]


def found_as(name: str, shape: Sequence[int], held: Collection[str], tied: bool = False) -> list[Stored]:
    """As `stored_as`, or stacked, fused or quantized, if that is what the files have; a `tied` embedding also as the
    head."""
    if is_score_head(name) and adapter_name(name) in held:
        return [Stored(adapter_name(name))]
    written = stored_as(name, shape)
    if tied and written[0].name == EMBEDDING and EMBEDDING not in held and HEAD in held:
        return [Stored(HEAD)]
    layer, _, projection = name.partition(EXPERTS)
    if written[0].transposed and written[0].name + BLOCKS in held and shape[-1] % BLOCK == 0:
        return [written[0]._replace(quantized=True)]
    if written[0].expert is None or written[0].name in held:
        return written
    kind = projection.removesuffix("_proj.weight")
    whole = f"model.{layer}{EXPERTS}{kind}_proj"
    if stacked := next((n for n in (whole, f"{whole}.weight") if n in held), None):
        return [Stored(stacked)]
    fused = f"model.{layer}{EXPERTS}{FUSED}"
    if kind != "down" and fused in held:
        experts, rows, columns = shape
        return [Stored(fused, first_row=0 if kind == "gate" else rows, shape=(experts, 2 * rows, columns))]
    return written
