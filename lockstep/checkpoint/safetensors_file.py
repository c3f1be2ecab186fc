"""The layout of safetensors files, planned before values are known: which tensor is in which file, and where."""

from __future__ import annotations

import json
from typing import Any

import torch

MAX_FILE_BYTES = 5 * 10**9
DTYPES = {
    torch.float64: "F64", torch.int64: "I64", torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16",
    torch.float16: "F16", torch.uint8: "U8", torch.bool: "BOOL",
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
