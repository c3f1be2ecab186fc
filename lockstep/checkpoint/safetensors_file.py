"""The layout of safetensors files: which tensor is in which file, and the bytes of a tensor or of a slice of it.

It is planned before values are known.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lockstep.errors import UserError

MAX_FILE_BYTES = 5 * 10**9
DTYPES = {
    torch.float64: "F64", torch.int64: "I64", torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16",
    torch.float16: "F16", torch.uint8: "U8", torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3", torch.bool: "BOOL",
}  # fmt: skip
"""safetensors' names, widest first: in this order every tensor is aligned to its element size."""


def split_files(sizes: dict[str, int], max_bytes: int) -> list[list[str]]:
    """Splits tensors with `sizes` in bytes into consecutive files; one larger than `max_bytes` has its own file."""
    files: list[list[str]] = [[]]
    total = 0
    for name, size in sizes.items():
        if files[-1] and total + size > max_bytes:
            files.append([])
            total = 0
        files[-1].append(name)
        total += size
    return files


def file_name(stem: str, index: int, count: int) -> str:
    """Name of file `index` (from 0) of `count`, as Hugging Face numbers them."""
    return f"{stem}-{index + 1:05}-of-{count:05}.safetensors" if count > 1 else f"{stem}.safetensors"


def header(tensors: dict[str, tuple[torch.dtype, torch.Size]]) -> tuple[bytes, dict[str, int]]:
    """A file's header, and each tensor's offset in the file."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins, begin = {}, 0
    for name, (dtype, shape) in tensors.items():
        end = begin + shape.numel() * dtype.itemsize
        entries[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begins[name], begin = begin, end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + begin for name, begin in begins.items()}


def open_safetensors(path: Path) -> Any:
    """Opens a file without reading its tensors. Raises UserError, naming the file."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: cannot be read as safetensors ({error}); delete this checkpoint") from error


def slices(offsets: Iterable[int], sizes: Iterable[int]) -> tuple[slice, ...]:
    """The index of a shard slice in its tensor."""
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes))


def bytes_of(tensor: Tensor) -> memoryview:
    """A CPU tensor's values in row-major order, as stored in a file."""
    values: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(values)


def contiguous_ranges(
    shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...], dtype: torch.dtype
) -> Iterator[tuple[int, int]]:
    """The bytes of a shard slice in a row-major tensor: first byte and length of each contiguous range."""
    strides = [math.prod(shape[axis + 1 :]) * dtype.itemsize for axis in range(len(shape))]
    # The last axis that the slice cuts; along it and all later axes the slice is contiguous.
    cut = max((axis for axis in range(len(shape)) if sizes[axis] != shape[axis]), default=0)
    length = math.prod(sizes[cut:]) * dtype.itemsize
    outer = [range(offset, offset + size) for offset, size in zip(offsets[:cut], sizes[:cut])]
    inner = offsets[cut] * strides[cut] if len(shape) else 0
    for index in itertools.product(*outer):
        yield sum(i * stride for i, stride in zip(index, strides)) + inner, length
