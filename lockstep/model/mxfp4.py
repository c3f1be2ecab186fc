"""MXFP4 tensors in a file, read as floating-point numbers: blocks of 32 four-bit numbers with a common scale.

Numbers are e2m1; scales are e8m0, powers of two (Open Compute Project, "OCP Microscaling Formats Specification", 2023).
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from lockstep.errors import UserError
from lockstep.model.stored_tensor import StoredTensor, whole_place

BLOCK = 32
"""Numbers per scale."""
BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of the two stored tensors' names, after the name of the tensor that they represent."""
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the lower three bits; the fourth is the sign."""
BIAS = 127
NAN = 255
"""The scale byte that represents NaN."""


def dequantized(
    blocks: UInt8[Tensor, "experts out blocks half"], scales: UInt8[Tensor, "experts out blocks"]
) -> Float[Tensor, "experts out in"]:
    """In bfloat16, which represents all values exactly: a number's two significant bits, and a power of two. A scale of
    `NAN` gives NaN.

    In each byte, the lower four bits come first.
    """
    table = torch.tensor([*NUMBERS, *(-x for x in NUMBERS)], dtype=torch.bfloat16)
    numbers = torch.stack((table[(blocks & 15).int()], table[(blocks >> 4).int()]), -1).flatten(-2)
    powers = torch.where(scales == NAN, torch.nan, torch.exp2(scales.double() - BIAS)).bfloat16()
    return (numbers * powers[..., None]).flatten(-2)


class Mxfp4Experts:
    """Folders whose experts are MXFP4. No settings are read."""

    def __init__(self, settings: dict[str, Any], where: str):
        pass

    def __call__(self, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
        """The folder's tensors, with weights in place of blocks and scales. Raises UserError if one is missing."""
        weights = dict(stored)
        for name in [name.removesuffix(BLOCKS) for name in stored if name.endswith(BLOCKS)]:
            if name + SCALES not in stored:
                raise UserError(f"{stored[name + BLOCKS].file}: tensor {name}{SCALES} is missing")
            weights[name] = Mxfp4(name, weights.pop(name + BLOCKS), weights.pop(name + SCALES))
        return weights


class Mxfp4:
    """Experts' weights `[experts, in, out]` in a file, one place of which is read at a time.

    They are stored as `[experts, out, in / 32, 16]` bytes, and `[experts, out, in / 32]` scales. Raises UserError for
    other types and shapes. Reading a place raises UserError, with `name`, for a scale that is NaN: no weight is NaN, so
    the file is damaged.
    """

    def __init__(self, name: str, blocks: StoredTensor, scales: StoredTensor):
        self.file, self._name, self._blocks, self._scales = blocks.file, name, blocks, scales
        for end, part in ((BLOCKS, blocks), (SCALES, scales)):
            if part.get_dtype() != "U8":
                raise UserError(f"{part.file}: tensor {name}{end} is {part.get_dtype()}; only U8 are read")
        shape = blocks.get_shape()
        if len(shape) != 4 or shape[-1] != BLOCK // 2 or scales.get_shape() != shape[:-1]:
            raise UserError(
                f"{scales.file}: tensor {name}{SCALES} has shape {scales.get_shape()}, which does not fit blocks of "
                f"shape {shape}; these have one more dimension, of {BLOCK // 2} bytes"
            )
        self._shape = [shape[0], BLOCK * shape[2], shape[1]]

    def get_shape(self) -> list[int]:
        return self._shape

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, place: Any) -> Tensor:
        experts, inputs, outputs = whole_place(place, self._shape)
        first = inputs.start // BLOCK
        whole = slice(first, -(-inputs.stop // BLOCK))
        inside = slice(inputs.start - first * BLOCK, inputs.stop - first * BLOCK)
        # Expert by expert: the table lookup needs int64 indices, several times as large as the stored bytes.
        parts = []
        for expert in range(experts.start, experts.stop):
            stored = (slice(expert, expert + 1), outputs, whole)
            scales = self._scales[stored]
            if (scales == NAN).any():
                raise UserError(
                    f"tensor {self._name}{SCALES} has a scale byte of {NAN} for expert {expert}, which MXFP4 defines "
                    "as NaN; the file is damaged or was quantized from weights that were not finite: download it again"
                )
            parts.append(dequantized(self._blocks[stored], scales)[..., inside].mT)
        return torch.cat(parts)
