"""Tensors sharded over ranks, stored as whole tensors in safetensors files.

Every rank writes its values to their place in the whole tensor's file. So a checkpoint does not depend on the layout
it was saved under, and its `model` files are those of a Hugging Face folder. Ranks exchange JSON messages and need a
shared file system.
"""

from __future__ import annotations

import itertools
import math
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lockstep.checkpoint.manifest import CHUNK, Piece
from lockstep.checkpoint.part import Part
from lockstep.checkpoint.safetensors_file import (
    DTYPES,
    MAX_FILE_BYTES,
    bytes_of,
    contiguous_ranges,
    file_name,
    header,
    open_safetensors,
    split_files,
)
from lockstep.parallel.messages import from_all

OF_NAME = {name: dtype for dtype, name in DTYPES.items()}


Kinds = dict[str, tuple[torch.dtype, torch.Size]]
"""Dtype and shape of every tensor, by name."""
Offsets = tuple[int, ...]


def save_parts(
    parts: Mapping[str, Part],
    folder: Path,
    stems: Mapping[str, str],
    complete: Callable[[dict[str, str], list[Piece]], None],
    group: dist.ProcessGroup | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes tensors named `GROUP/NAME` under `NAME` into the files of the group: `STEM.safetensors`, or several.

    A collective over `group` (None: only this process), in which each rank passes its parts in host memory. Each value
    is written by one of the ranks that have it. `stems` has each group's stem, relative to `folder`. When all have
    written, rank 0 calls `complete` with the file of each tensor and the pieces written. Raises OSError, on all ranks,
    if the disk fails on one of them, and RuntimeError if anything else fails on one.
    """
    rank = 0 if group is None else dist.get_rank(group)
    local = {name: part for name, part in parts.items() if part.local.numel()}
    of_ranks = _on_all(
        lambda: [(n, *p.shard_slice, DTYPES[p.local.dtype], tuple(p.shape)) for n, p in local.items()], group
    )
    kinds, writers = _plan(of_ranks)
    files, begins, heads = _layout(kinds, stems, max_file_bytes)
    _on_all(lambda: _create_files(folder, heads) if rank == 0 else None, group)
    assigned = {name: part for name, part in local.items() if writers[name, part.shard_slice[0]] == rank}
    pieces = _on_all(lambda: [vars(piece) for piece in _write_parts(assigned, folder, files, begins)], group)
    written = [Piece(**piece) for of_rank in pieces for piece in of_rank]
    _on_all(lambda: complete(files, written) if rank == 0 else None, group)


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor in a file."""

    path: Path
    name: str
    shape: torch.Size
    dtype: torch.dtype


class StoredTensors(dict[str, StoredTensor]):
    """The tensors in safetensors files, by `GROUP/NAME`; `files` has the group of every file. Reads no values."""

    def __init__(self, files: Mapping[Path, str]):
        self._opened = {path: open_safetensors(path) for path in files}
        for path, group in files.items():
            for name in self._opened[path].keys():  # noqa: SIM118
                entry = self._opened[path].get_slice(name)
                shape, dtype = torch.Size(entry.get_shape()), OF_NAME[entry.get_dtype()]
                self[f"{group}/{name}"] = StoredTensor(path, name, shape, dtype)

    def fill(self, parts: Mapping[str, Part]) -> None:
        """Reads the values of `parts` into their memory, file by file. Raises ValueError if shapes differ."""
        for name, part in sorted(parts.items(), key=lambda item: str(self[item[0]].path)):
            stored = self[name]
            if stored.shape != part.shape:
                raise ValueError(f"{name} has shape {list(stored.shape)} in {stored.path}, not {list(part.shape)}")
            if part.local.numel():
                part.local.copy_(self._opened[stored.path].get_slice(stored.name)[part.place])


def _on_all(action: Callable[[], Any], group: dist.ProcessGroup | None) -> list[Any]:
    """Runs `action` on every rank; returns all results (JSON-serializable) on every rank, or raises on all of them."""
    if group is None:
        return [action()]
    result: Any = None
    failure: BaseException | None = None
    try:
        result = action()
    except BaseException as error:  # sent to all ranks, which would wait for this one, and raised on all
        failure = error
    answers = from_all([result, failure and [str(failure) or repr(failure), isinstance(failure, OSError)]], group)
    if failure is not None and not isinstance(failure, Exception):
        raise failure
    if failures := [(rank, *reason) for rank, (_, reason) in enumerate(answers) if reason]:
        kind = OSError if all(of_disk for _, _, of_disk in failures) else RuntimeError
        raise kind("; ".join(f"rank {rank}: {why}" for rank, why, _ in failures)) from failure
    return [result for result, _ in answers]


def _plan(of_ranks: list[list[Any]]) -> tuple[Kinds, dict[tuple[str, Offsets], int]]:
    """The tensors, and the rank that writes each slice, by name and offsets: of those that have it, the one with the
    fewest bytes so far. The same on every rank.

    Raises RuntimeError unless the slices cover each value of a tensor exactly once.
    """
    kinds: dict[str, Any] = {}
    holders: dict[tuple[str, Offsets], list[int]] = defaultdict(list)
    sizes_of: dict[tuple[str, Offsets], int] = {}
    slices: dict[str, dict[tuple[Offsets, tuple[int, ...]], None]] = defaultdict(dict)
    for rank, shard_slices in enumerate(of_ranks):
        for name, offsets, sizes, *kind in shard_slices:
            if kinds.setdefault(name, kind) != kind:
                raise RuntimeError(f"{name} is {kinds[name]} on one rank and {kind} on another")
            holders[name, tuple(offsets)].append(rank)
            sizes_of[name, tuple(offsets)] = math.prod(sizes)
            slices[name][tuple(offsets), tuple(sizes)] = None
    tensors = {name: (OF_NAME[dtype], torch.Size(shape)) for name, (dtype, shape) in kinds.items()}
    for name, (_, shape) in tensors.items():
        _refuse_gaps(name, shape, list(slices[name]))
    written = [0] * len(of_ranks)
    writers = {}
    for key, ranks in holders.items():
        writers[key] = min(ranks, key=lambda rank: written[rank])
        written[writers[key]] += sizes_of[key] * tensors[key[0]][0].itemsize
    return tensors, writers


def _refuse_gaps(name: str, shape: torch.Size, shard_slices: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """Raises RuntimeError unless `shard_slices`, of offsets and sizes, cover each value of the tensor exactly once."""
    begins, sizes = np.array(shard_slices, np.int64).reshape(len(shard_slices), 2, len(shape)).swapaxes(0, 1)
    edges = begins, begins + sizes
    # Between two neighboring cuts of each axis, all values are in the same slices.
    cuts = [np.unique(np.concatenate([[0, size], *(e[:, axis] for e in edges)])) for axis, size in enumerate(shape)]
    # The number of slices per value: +1 and -1 at the corners of each slice, summed along each axis.
    covered = np.zeros([len(cut) for cut in cuts], np.int64)
    for corner in itertools.product((0, 1), repeat=len(shape)):
        at = tuple(np.searchsorted(cut, edges[end][:, axis]) for axis, (cut, end) in enumerate(zip(cuts, corner)))
        np.add.at(covered, at, (-1) ** sum(corner))
    for axis in range(len(shape)):
        covered = covered.cumsum(axis)
    beyond = any(cut[0] < 0 or cut[-1] > size for cut, size in zip(cuts, shape))
    if beyond or (covered[tuple(slice(-1) for _ in shape)] != 1).any():
        raise RuntimeError(f"the ranks do not hold each value of {name} ({list(shape)}) once: {shard_slices[:4]}")


def _layout(
    tensors: Kinds, stems: Mapping[str, str], max_file_bytes: int
) -> tuple[dict[str, str], dict[str, int], dict[str, tuple[bytes, int]]]:
    """Each tensor's file, its offset there in bytes, and each file's header and size."""
    grouped: dict[str, list[str]] = defaultdict(list)
    widest_first = list(DTYPES)
    for name in sorted(tensors, key=lambda n: (widest_first.index(tensors[n][0]), n)):
        grouped[name.partition("/")[0]].append(name)
    files: dict[str, str] = {}
    begins: dict[str, int] = {}
    heads: dict[str, tuple[bytes, int]] = {}
    for group, names in grouped.items():
        sizes = {n: tensors[n][1].numel() * tensors[n][0].itemsize for n in names}
        split = split_files(sizes, max_file_bytes)
        for index, in_file in enumerate(split):
            file = file_name(stems[group], index, len(split))
            short = {n: n.partition("/")[2] for n in in_file}
            head, starts = header({short[n]: tensors[n] for n in in_file})
            heads[file] = head, len(head) + sum(sizes[n] for n in in_file)
            files |= dict.fromkeys(in_file, file)
            begins |= {n: starts[short[n]] for n in in_file}
    return files, begins, heads


def _create_files(folder: Path, heads: Mapping[str, tuple[bytes, int]]) -> None:
    """Creates the files at their full sizes, so that a full disk is noticed before anything is written."""
    for name, (head, size) in heads.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
            file.write(head)


def _write_parts(
    parts: Mapping[str, Part], folder: Path, files: Mapping[str, str], begins: Mapping[str, int]
) -> list[Piece]:
    pieces, opened = [], {}
    try:
        for name, part in parts.items():
            file = files[name]
            if file not in opened:
                opened[file] = os.open(folder / file, os.O_WRONLY)
            values = bytes_of(part.local)
            offsets, sizes = part.shard_slice
            done = 0
            for start, length in contiguous_ranges(part.shape, offsets, sizes, part.local.dtype):
                _write(opened[file], values[done : done + length], begins[name] + start)
                done += length
            pieces.append(Piece(file, name.partition("/")[2], offsets, sizes, zlib.crc32(values)))
        for descriptor in opened.values():
            os.fsync(descriptor)
    finally:
        for descriptor in opened.values():
            os.close(descriptor)
    return pieces


def _write(descriptor: int, values: memoryview, begin: int) -> None:
    done = 0
    while done < len(values):
        done += os.pwrite(descriptor, values[done : done + CHUNK], begin + done)
