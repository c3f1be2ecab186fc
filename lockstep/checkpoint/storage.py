"""torch.distributed.checkpoint's storage, in safetensors files of whole tensors.

Every rank writes the values that it holds to their place in the whole tensor's file. So a checkpoint knows nothing of
the layout it was saved under, its `model` files are those of a Hugging Face folder, and reading it takes no pickle.
All ranks must see the folder.
"""

from __future__ import annotations

import os
import zlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lockstep.checkpoint.boxes import bytes_of, open_safetensors, slices, stretches
from lockstep.checkpoint.manifest import CHUNK, Piece
from lockstep.checkpoint.safetensors_file import DTYPES, MAX_FILE_BYTES, file_name, header, split_files


@dataclass(frozen=True)
class Place:
    """Where a whole tensor stands: its file, and its first byte there."""

    file: str
    begin: int
    shape: torch.Size


class SafetensorsWriter(StorageWriter):
    """Writes tensors named `GROUP/NAME` under `NAME` into the files of the group: `STEM.safetensors`, or several.

    `stems` has each group's stem, relative to `folder`. When all ranks have written, the coordinator calls `complete`
    with the tensors' files by name and what was written where; what that raises fails the save on all ranks.
    """

    def __init__(
        self,
        folder: Path,
        stems: dict[str, str],
        complete: Callable[[dict[str, str], list[Piece]], None],
        max_file_bytes: int = MAX_FILE_BYTES,
    ):
        self.folder, self.stems, self.complete, self.max_file_bytes = folder, stems, complete, max_file_bytes
        self._places: dict[str, Place] = {}

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: makes the files, at their full sizes, so that a full disk is met before any writing."""
        data = {item.index.fqn: _data(item) for plan in plans for item in plan.items}
        grouped: dict[str, list[str]] = defaultdict(list)
        widest_first = list(DTYPES)
        for name in sorted(data, key=lambda n: (widest_first.index(data[n].properties.dtype), n)):
            grouped[name.partition("/")[0]].append(name)
        places: dict[str, Place] = {}
        for group, names in grouped.items():
            sizes = {n: data[n].size.numel() * data[n].properties.dtype.itemsize for n in names}
            files = split_files(sizes, self.max_file_bytes)
            for index, held in enumerate(files):
                file = file_name(self.stems[group], index, len(files))
                short = {n: n.partition("/")[2] for n in held}
                head, begins = header({short[n]: (data[n].properties.dtype, data[n].size) for n in held})
                _create(self.folder / file, head, len(head) + sum(sizes[n] for n in held))
                places |= {n: Place(file, begins[short[n]], data[n].size) for n in held}
        self._places = places
        return [replace(plan, storage_data={i.index.fqn: places[i.index.fqn] for i in plan.items}) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results, opened = [], {}
        try:
            for item in plan.items:
                place: Place = plan.storage_data[item.index.fqn]
                if place.file not in opened:
                    opened[place.file] = os.open(self.folder / place.file, os.O_WRONLY)
                chunk, dtype = _data(item).chunk, _data(item).properties.dtype
                values = bytes_of(cast(Tensor, planner.resolve_data(item)))
                done = 0
                for start, length in stretches(place.shape, chunk.offsets, chunk.sizes, dtype):
                    _write(opened[place.file], values[done : done + length], place.begin + start)
                    done += length
                name = item.index.fqn.partition("/")[2]
                piece = Piece(place.file, name, tuple(chunk.offsets), tuple(chunk.sizes), zlib.crc32(values))
                results.append(WriteResult(item.index, len(values), piece))
            for descriptor in opened.values():
                os.fsync(descriptor)
        finally:
            for descriptor in opened.values():
                os.close(descriptor)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pieces = [result.storage_data for of_rank in results for result in of_rank]
        self.complete({name: place.file for name, place in self._places.items()}, pieces)

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class SafetensorsReader(StorageReader):
    """Reads any part of any tensor. `files` has the group of every file; a tensor's name is `GROUP/NAME`."""

    def __init__(self, files: dict[Path, str]):
        self._opened = {path: open_safetensors(path) for path in files}
        self._files = {
            f"{group}/{name}": path
            for path, group in files.items()
            for name in self._opened[path].keys()  # noqa: SIM118
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        of_name = {name: dtype for dtype, name in DTYPES.items()}
        tensors: dict[str, Any] = {}
        for name, path in self._files.items():
            entry = self._opened[path].get_slice(name.partition("/")[2])
            shape = torch.Size(entry.get_shape())
            whole = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
            tensors[name] = TensorStorageMetadata(TensorProperties(of_name[entry.get_dtype()]), shape, [whole])
        return Metadata(tensors)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in sorted(plan.items, key=lambda item: str(self._files[item.storage_index.fqn])):
            file = self._opened[self._files[item.storage_index.fqn]]
            name = item.storage_index.fqn.partition("/")[2]
            values = file.get_slice(name)[slices(item.storage_offsets, item.lengths)]
            planner.resolve_tensor(item).copy_(values)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None
    return item.tensor_data


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
