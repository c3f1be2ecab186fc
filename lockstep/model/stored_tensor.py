"""A tensor of a model folder, of which places are read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class StoredTensor(Protocol):
    """A tensor in any stored form, indexed by a slice for each dimension, or for the first ones."""

    file: Path
    """The file that it is in; of several, that of the first part."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str:
        """As safetensors names it. A quantized weight is BF16, the dtype in which such folders are computed by default;
        its places may be read in another one that has their values exactly."""

    def __getitem__(self, place: Any) -> Tensor: ...


class FileTensor:
    """A tensor as it is in a safetensors file."""

    def __init__(self, file: Path, stored: Any):
        self.file, self._stored = file, stored

    def get_shape(self) -> list[int]:
        shape: list[int] = self._stored.get_shape()
        return shape

    def get_dtype(self) -> str:
        return str(self._stored.get_dtype())

    def __getitem__(self, place: Any) -> Tensor:
        values: Tensor = self._stored[place]
        return values


class Ones:
    """A tensor of ones that is in no file."""

    file = Path()

    def __init__(self, shape: Sequence[int]):
        self._shape = list(shape)

    def get_shape(self) -> list[int]:
        return self._shape

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, place: Any) -> Tensor:
        return torch.ones([of.stop - of.start for of in whole_place(place, self._shape)])


def whole_place(place: Any, shape: Sequence[int]) -> tuple[slice, ...]:
    """A slice with start and stop for each dimension, from one that may leave out the last ones."""
    given = place if isinstance(place, tuple) else (place,)
    given += (slice(None),) * (len(shape) - len(given))
    return tuple(slice(*of.indices(size)[:2]) for of, size in zip(given, shape))
