"""The types of tensors in GGUF files that are read, and their blocks of bytes as floating-point numbers.

After ggml's `dequantize_row_*` (ggml-quants.c), with the same float32 operations in the same order. `llama-quantize`
gives some tensors of a Q4_0 file the types Q4_1 and Q6_K, which are read for that reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

Bytes = UInt8[Tensor, "*rows bytes"]
Values = Float[Tensor, "*rows values"]


class BlockType(NamedTuple):
    """A type of tensors, whose rows are stored in blocks."""

    name: str
    values: int
    """Values in a block."""
    size: int
    """Bytes of a block."""
    decode: Callable[[Bytes], Values]


def plain(dtype: torch.dtype) -> Callable[[Bytes], Values]:
    """Numbers that are stored as they are."""
    return lambda blocks: blocks.view(dtype)


def q4_0(blocks: Bytes) -> Values:
    """A scale, and 16 bytes with the first values in their lower bits."""
    return _half(blocks[..., :2]) * (_nibbles(blocks[..., 2:]) - 8.0)


def q4_1(blocks: Bytes) -> Values:
    """A scale, a minimum, and bytes as in Q4_0."""
    return _half(blocks[..., :2]) * _nibbles(blocks[..., 4:]) + _half(blocks[..., 2:4])


def q8_0(blocks: Bytes) -> Values:
    """A scale, and signed bytes."""
    return _half(blocks[..., :2]) * blocks[..., 2:].contiguous().view(torch.int8)


def q6_k(blocks: Bytes) -> Values:
    """The lower four bits of 256 values, their upper two bits, a signed scale for every 16 values, and their scale.

    Each half of the values is stored by itself: 64 bytes with four bits of value n and n + 64, and 32 bytes with two
    bits of each of the values n, n + 32, n + 64 and n + 96.
    """
    low, high, scales, scale = blocks.split((128, 64, 16, 2), dim=-1)
    low = _bits(low.unflatten(-1, (2, 1, 64)), 4).flatten(-2)
    high = _bits(high.unflatten(-1, (2, 1, 32)), 2).flatten(-2)
    numbers = (low | (high << 4)).flatten(-2).unflatten(-1, (16, 16)) - 32.0
    return (numbers * (_half(scale) * scales.contiguous().view(torch.int8))[..., None]).flatten(-2)


def _half(two_bytes: Bytes) -> Values:
    return two_bytes.contiguous().view(torch.float16).float()


def _nibbles(data: Bytes) -> UInt8[Tensor, "*rows values"]:
    """The lower four bits of all bytes, then the upper ones."""
    return _bits(data.unsqueeze(-2), 4).flatten(-2)


def _bits(data: UInt8[Tensor, "*rows 1 bytes"], width: int) -> UInt8[Tensor, "*rows parts bytes"]:
    """Numbers of `width` bits in each byte, the lowest first."""
    return (data >> torch.arange(0, 8, width, dtype=torch.uint8)[:, None]) & (2**width - 1)


TYPES = {
    0: BlockType("F32", 1, 4, plain(torch.float32)),
    1: BlockType("F16", 1, 2, plain(torch.float16)),
    30: BlockType("BF16", 1, 2, plain(torch.bfloat16)),
    2: BlockType("Q4_0", 32, 18, q4_0),
    3: BlockType("Q4_1", 32, 20, q4_1),
    8: BlockType("Q8_0", 32, 34, q8_0),
    14: BlockType("Q6_K", 256, 210, q6_k),
}
"""By ggml's numbers (`enum ggml_type`)."""
OTHERS = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8",
    25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
"""Names of types that are not read, for messages."""
