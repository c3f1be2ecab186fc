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
from lockstep.checkpoint.safetensors_file import DTYPES, MAX_FILE_BYTES, file_name, header, split_files
from lockstep.checkpoint.shard_slices import bytes_of, contiguous_ranges, open_safetensors
from lockstep.parallel.messages import from_rank_0, to_rank_0

OF_NAME = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class Plan:
    """The file and offset of every tensor, and which rank writes which part."""

    files: dict[str, str]
    """File by tensor name."""
    begins: dict[str, int]
    """Offset of a tensor in its file, in bytes."""
    writes: list[list[int]]
    """For each rank and each of its parts, 1 if it writes it."""


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
    ranks = _Ranks(group)
    local = {name: part for name, part in parts.items() if part.local.numel()}
    of_ranks = ranks.each(
        lambda: [(n, *p.shard_slice, DTYPES[p.local.dtype], tuple(p.shape)) for n, p in local.items()]
    )
    plan = Plan(**ranks.first(lambda: vars(_plan(of_ranks, folder, stems, max_file_bytes))))
    assigned = {name: part for (name, part), writes in zip(local.items(), plan.writes[ranks.rank]) if writes}
    pieces = ranks.each(lambda: [vars(piece) for piece in _write_parts(assigned, folder, plan)])
    ranks.first(lambda: complete(plan.files, [Piece(**piece) for of_rank in pieces for piece in of_rank]))


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


class _Ranks:
    """Runs actions that succeed on all ranks or fail on all of them. Their results are JSON-serializable."""

    def __init__(self, group: dist.ProcessGroup | None):
        self._group = group
        self.rank = dist.get_rank(group) if group is not None else 0

    def each(self, action: Callable[[], Any]) -> list[Any]:
        """Runs `action` on every rank; returns all results on rank 0, and nothing on the others."""
        if self._group is None:
            return [action()]
        result: Any = None
        failure: BaseException | None = None
        try:
            result = action()
        except BaseException as error:  # sent to all ranks, which would wait for this one, and raised on all
            failure = error
        reason = failure and [str(failure) or repr(failure), isinstance(failure, OSError)]
        answers = to_rank_0([result, reason], self._group)
        failures = from_rank_0([(rank, *reason) for rank, (_, reason) in enumerate(answers) if reason], self._group)
        if failure is not None and not isinstance(failure, Exception):
            raise failure
        if failures:
            kind = OSError if all(of_disk for _, _, of_disk in failures) else RuntimeError
            raise kind("; ".join(f"rank {rank}: {why}" for rank, why, _ in failures)) from failure
        return [result for result, _ in answers]

    def first(self, action: Callable[[], Any]) -> Any:
        """Runs `action` on rank 0; returns its result on all ranks."""
        results = self.each(lambda: action() if self.rank == 0 else None)
        return results[0] if self._group is None else from_rank_0(results[:1], self._group)[0]


def _plan(of_ranks: list[list[Any]], folder: Path, stems: Mapping[str, str], max_file_bytes: int) -> Plan:
    """Assigns each shard slice to the rank that has it with the fewest bytes so far, and creates the files."""
    kinds: dict[str, tuple[str, Any]] = {}
    holders: dict[str, dict[Any, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for rank, shard_slices in enumerate(of_ranks):
        for index, (name, offsets, sizes, *kind) in enumerate(shard_slices):
            if kinds.setdefault(name, kind) != kind:
                raise RuntimeError(f"{name} is {kinds[name]} on one rank and {kind} on another")
            holders[name][tuple(offsets), tuple(sizes)].append((rank, index))
    tensors = {name: (OF_NAME[dtype], torch.Size(shape)) for name, (dtype, shape) in kinds.items()}
    written = [0] * len(of_ranks)
    writes = [[0] * len(shard_slices) for shard_slices in of_ranks]
    for name, of_shard_slices in holders.items():
        _refuse_gaps(name, tensors[name][1], list(of_shard_slices))
        for (_, sizes), of_shard_slice in of_shard_slices.items():
            rank, index = min(of_shard_slice, key=lambda holder: written[holder[0]])
            writes[rank][index] = 1
            written[rank] += math.prod(sizes) * tensors[name][0].itemsize
    files, begins = _create_files(tensors, folder, stems, max_file_bytes)
    return Plan(files, begins, writes)


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


def _create_files(
    tensors: dict[str, tuple[torch.dtype, torch.Size]], folder: Path, stems: Mapping[str, str], max_file_bytes: int
) -> tuple[dict[str, str], dict[str, int]]:
    """Creates the files at their full sizes, so that a full disk is noticed before anything is written.

    Returns each tensor's file, and its offset there.
    """
    grouped: dict[str, list[str]] = defaultdict(list)
    widest_first = list(DTYPES)
    for name in sorted(tensors, key=lambda n: (widest_first.index(tensors[n][0]), n)):
        grouped[name.partition("/")[0]].append(name)
    files: dict[str, str] = {}
    begins: dict[str, int] = {}
    for group, names in grouped.items():
        sizes = {n: tensors[n][1].numel() * tensors[n][0].itemsize for n in names}
        split = split_files(sizes, max_file_bytes)
        for index, in_file in enumerate(split):
            file = file_name(stems[group], index, len(split))
            short = {n: n.partition("/")[2] for n in in_file}
            head, starts = header({short[n]: tensors[n] for n in in_file})
            _create(folder / file, head, len(head) + sum(sizes[n] for n in in_file))
            files |= dict.fromkeys(in_file, file)
            begins |= {n: starts[short[n]] for n in in_file}
    return files, begins


def _write_parts(parts: Mapping[str, Part], folder: Path, plan: Plan) -> list[Piece]:
    pieces, opened = [], {}
    try:
        for name, part in parts.items():
            file = plan.files[name]
            if file not in opened:
                opened[file] = os.open(folder / file, os.O_WRONLY)
            values = bytes_of(part.local)
            offsets, sizes = part.shard_slice
            done = 0
            for start, length in contiguous_ranges(part.shape, offsets, sizes, part.local.dtype):
                _write(opened[file], values[done : done + length], plan.begins[name] + start)
                done += length
            pieces.append(Piece(file, name.partition("/")[2], offsets, sizes, zlib.crc32(values)))
        for descriptor in opened.values():
            os.fsync(descriptor)
    finally:
        for descriptor in opened.values():
            os.close(descriptor)
    return pieces


def _create(path: Path, head: bytes, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)
        file.write(head)


def _write(descriptor: int, values: memoryview, begin: int) -> None:
    done = 0
    while done < len(values):
        done += os.pwrite(descriptor, values[done : done + CHUNK], begin + done)
