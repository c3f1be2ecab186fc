"""MXFP4 tensors in a file, read as floating-point numbers: blocks of 32 four-bit numbers with a common scale.

Numbers are e2m1; scales are e8m0, powers of two (Open Compute Project, "OCP Microscaling Formats Specification", 2023).
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from lockstep.errors import UserError

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


class Mxfp4:
    """Experts' weights `[experts, in, out]` in a file, indexed like a tensor's slice, one place at a time.

    They are stored as `[experts, out, in / 32, 16]` bytes, and `[experts, out, in / 32]` scales. Reading a place raises
    UserError, with `name`, for a scale that is NaN: no weight is NaN, so the file is damaged.
    """

    def __init__(self, name: str, blocks: Any, scales: Any):
        self.name, self.blocks, self.scales = name, blocks, scales

    def __getitem__(self, place: tuple[slice, slice, slice]) -> Tensor:
        experts, inputs, outputs = place
        first = inputs.start // BLOCK
        whole = slice(first, -(-inputs.stop // BLOCK))
        inside = slice(inputs.start - first * BLOCK, inputs.stop - first * BLOCK)
        # Expert by expert: the table lookup needs int64 indices, several times as large as the stored bytes.
        parts = []
        for expert in range(experts.start, experts.stop):
            stored = (slice(expert, expert + 1), outputs, whole)
            scales = self.scales[stored]
            if (scales == NAN).any():
                raise UserError(
                    f"tensor {self.name}{SCALES} has a scale byte of {NAN} for expert {expert}, which MXFP4 defines as "
                    "NaN; the file is damaged or was quantized from weights that were not finite: download it again"
                )
            parts.append(dequantized(self.blocks[stored], scales)[..., inside].mT)
        return torch.cat(parts)
