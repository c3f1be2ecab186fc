"""A GGUF file, llama.cpp's format: its metadata, and its tensors, places of which are read from the file.

After the specification in ggml's docs/gguf.md, versions 2 and 3. The package `gguf` is not used: it takes seven seconds
to list the metadata of a vocabulary of 150,000 tokens, and has no errors for truncated files.
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.model.gguf_blocks import OTHERS, TYPES, BlockType
from lockstep.model.stored_tensor import whole_place

MAGIC, VERSIONS = b"GGUF", (2, 3)
STRING, ARRAY = 8, 9
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of values of a fixed size, and their formats in `struct`."""
ALIGNMENT = "general.alignment"
DAMAGED = "the file is damaged or incomplete; download it again"


class GgufFile:
    """Raises UserError for a file that is not GGUF, is truncated or has tensors of a type that is not read."""

    def __init__(self, path: Path):
        header = _Header(path)
        tensors, values = header.start()
        self.path = path
        self.metadata: dict[str, Any] = {header.string(): header.value() for _ in range(values)}
        """By key; a list of strings, such as the vocabulary, is only its length."""
        listed = [header.tensor() for _ in range(tensors)]
        alignment = self.metadata.get(ALIGNMENT, 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise UserError(f"{path}: {ALIGNMENT} is {alignment!r:.40}, which is not a power of two; {DAMAGED}")
        start = -(-header.position // alignment) * alignment
        self.tensors = {
            name: GgufTensor(path, header.bytes, name, kind, shape, start + offset)
            for name, kind, shape, offset in listed
        }
        """By ggml's names."""


@lru_cache(maxsize=8)
def open_gguf(path: Path, written: int) -> GgufFile:
    """The file, opened once. written: its modification time, so that a change is noticed."""
    return GgufFile(path)


class GgufTensor:
    """A tensor in the file, in PyTorch's order of dimensions: ggml lists the last one first."""

    def __init__(self, path: Path, data: np.ndarray, name: str, kind: BlockType, shape: list[int], offset: int):
        self.file, self.kind, self._shape = path, kind, shape
        if not shape or shape[-1] % kind.values:
            raise UserError(
                f"{path}: tensor {name} has shape {shape}, but {kind.name} has blocks of {kind.values}; {DAMAGED}"
            )
        stored = (*shape[:-1], shape[-1] // kind.values * kind.size)
        if offset + math.prod(stored) > len(data):
            raise UserError(f"{path}: ends before the values of tensor {name}; {DAMAGED}")
        self.bytes = data[offset : offset + math.prod(stored)].reshape(stored)

    def get_shape(self) -> list[int]:
        return self._shape

    def get_dtype(self) -> str:
        return self.kind.name if self.kind.values == 1 else "BF16"

    def __getitem__(self, place: Any) -> Tensor:
        values, size = self.kind.values, self.kind.size
        *outer, last = whole_place(place, self._shape)
        first, stop = last.start // values, -(-last.stop // values)
        blocks = torch.from_numpy(np.array(self.bytes[(*outer, slice(first * size, stop * size))]))
        decoded = self.kind.decode(blocks.unflatten(-1, (stop - first, size))).flatten(-2)
        return decoded.narrow(-1, last.start - first * values, last.stop - last.start)


class _Header:
    """Reads a file's header from its beginning."""

    def __init__(self, path: Path):
        self._path = path
        if path.stat().st_size < len(MAGIC):
            raise UserError(f"{path}: is too small for a GGUF file; {DAMAGED}")
        self.bytes = np.memmap(path, mode="r")
        self._buffer = self.bytes.data
        self.position = 0

    def start(self) -> tuple[int, int]:
        """The numbers of tensors and of metadata values."""
        if self._take(len(MAGIC)) != MAGIC:
            raise UserError(f"{self._path}: is not a GGUF file: it does not begin with {MAGIC.decode()}")
        version: int = self.number("I")
        if version not in VERSIONS:
            big = " (a file for big-endian machines)" if version & 0xFFFF == 0 else ""
            raise UserError(
                f"{self._path}: is GGUF version {version}{big}; only {VERSIONS[0]} and {VERSIONS[1]} are read: convert "
                "the model again with a current llama.cpp"
            )
        return self.number("Q"), self.number("Q")

    def _take(self, size: int) -> memoryview:
        if size > len(self._buffer) - self.position:
            raise UserError(f"{self._path}: ends within its header; {DAMAGED}")
        self.position += size
        return self._buffer[self.position - size : self.position]

    def number(self, kind: str) -> Any:
        """A number in a format of `struct`."""
        return struct.unpack(f"<{kind}", self._take(struct.calcsize(f"<{kind}")))[0]

    def string(self) -> str:
        return bytes(self._take(self.number("Q"))).decode(errors="replace")

    def value(self) -> Any:
        """A value of the metadata, after its type."""
        return self._of_type(self.number("I"))

    def _of_type(self, kind: int) -> Any:
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            raise UserError(f"{self._path}: has a metadata value of the unknown type {kind}; {DAMAGED}")
        kind, count = self.number("I"), self.number("Q")
        if kind == STRING:
            for _ in range(count):
                self._take(self.number("Q"))
            return count
        if kind in NUMBERS:
            each = struct.calcsize(f"<{NUMBERS[kind]}")
            return list(struct.unpack(f"<{count}{NUMBERS[kind]}", self._take(count * each)))
        raise UserError(f"{self._path}: has a metadata list of values of type {kind}, which are not read")

    def tensor(self) -> tuple[str, BlockType, list[int], int]:
        """A tensor's name, type, shape, and offset from the first byte after the header."""
        name, dimensions = self.string(), self.number("I")
        shape = [self.number("Q") for _ in range(dimensions)][::-1]
        kind, offset = self.number("I"), self.number("Q")
        if kind not in TYPES:
            raise UserError(
                f"{self._path}: tensor {name:.100} is {OTHERS.get(kind, f'of the unknown type {kind}')}; only "
                f"{', '.join(each.name for each in TYPES.values())} are read. Convert the file with llama.cpp: "
                "llama-quantize --allow-requantize FILE NEW_FILE BF16"
            )
        return name, TYPES[kind], shape, offset
