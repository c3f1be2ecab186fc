"""Weights stored as small numbers with one scale per block, read as floating-point numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.model.stored_tensor import StoredTensor, whole_place


class Scaled:
    """A weight `[..., rows, columns]` stored as codes and a scale for each block of `block` rows and columns; 0: all.

    Its values are (code - zero point) · scale, computed in float32: exact if the scales have at most 16 significant
    bits, else rounded once. `scales` and `zero_points` are `[..., rows / block, columns / block]`, where the last
    blocks may be incomplete; or one number for the whole weight. Scales that are bytes are exponents of two, e8m0 (OCP
    Microscaling Formats Specification, 2023). Raises UserError, with `name`, for other shapes.
    """

    def __init__(
        self,
        name: str,
        codes: StoredTensor,
        scales: StoredTensor,
        block: tuple[int, int],
        zero_points: StoredTensor | None = None,
    ):
        self.file, self._codes, self._scales, self._zero_points = codes.file, codes, scales, zero_points
        self._shape = codes.get_shape()
        if len(self._shape) < 2:
            raise UserError(f"{codes.file}: tensor {name} has shape {self._shape}; only matrices can be quantized")
        self._block = whole_block(self._shape, block)
        grid = scale_grid(self._shape, block)
        for what, part in (("scales", scales), ("zero points", zero_points)):
            if part is not None and part.get_shape() != grid and not is_one_number(part):
                raise UserError(
                    f"{codes.file}: tensor {name} has shape {self._shape} and {what} {part.get_shape()}, but blocks of "
                    f"{self._block[0]} × {self._block[1]} need {grid}; the file is damaged, or config.json describes "
                    "another format"
                )

    def get_shape(self) -> list[int]:
        return self._shape

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, place: Any) -> Tensor:
        whole = whole_place(place, self._shape)
        values = self._codes[whole].float()
        if self._zero_points is not None:
            values = values - self._of_each_value(self._zero_points, whole).float()
        scales = self._of_each_value(self._scales, whole)
        return values * (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).float()

    def _of_each_value(self, of_blocks: StoredTensor, place: tuple[slice, ...]) -> Tensor:
        """The number of its block for each value of a place."""
        if is_one_number(of_blocks):
            return of_blocks[()].reshape(())
        first = [of.start // size for of, size in zip(place[-2:], self._block)]
        stop = [-(-of.stop // size) for of, size in zip(place[-2:], self._block)]
        numbers = of_blocks[(*place[:-2], *map(slice, first, stop))]
        rows, columns = (torch.arange(of.start, of.stop) // size for of, size in zip(place[-2:], self._block))
        return numbers.index_select(-2, rows - first[0]).index_select(-1, columns - first[1])


def whole_block(shape: list[int], block: tuple[int, int]) -> tuple[int, int]:
    """The block's rows and columns in a weight of this shape, of which 0 means all."""
    return block[0] or shape[-2], block[1] or shape[-1]


def scale_grid(shape: list[int], block: tuple[int, int]) -> list[int]:
    """The shape of the scales of a weight `[..., rows, columns]`."""
    return [*shape[:-2], *(-(-size // of) for size, of in zip(shape[-2:], whole_block(shape, block)))]


def is_one_number(tensor: StoredTensor) -> bool:
    """Whether it is a number, of any number of dimensions."""
    return all(size == 1 for size in tensor.get_shape())
