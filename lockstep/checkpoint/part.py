"""What one rank holds of a named tensor, as torch.distributed.checkpoint asks for it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from lockstep.model.shard import local_part
from lockstep.model.stored import stored_as


class Part:
    """The values in `local`, which stand at `place` in a tensor of `shape`; nothing else of a layout is known."""

    def __init__(self, local: Tensor, place: tuple[slice, ...], shape: torch.Size):
        self.local, self.place, self.shape = local, place, shape

    @classmethod
    def of(cls, tensor: Tensor) -> Part:
        """This rank's part of `tensor`, in its own memory: all of it, unless it is a DTensor."""
        local, place = local_part(tensor.detach())
        return cls(local, place, tensor.shape)

    @classmethod
    def stored(cls, name: str, tensor: Tensor) -> dict[str, Part]:
        """This rank's parts of the tensors that parameter `name`, with these values, is in a model's files."""
        whole = cls.of(tensor)
        found = {}
        for stored in stored_as(name, tensor.shape):
            shape = torch.Size(stored.tensors(tensor.shape)[stored.name])
            if stored.expert is None:
                found[stored.name] = cls(stored.of(whole.local), stored.place(whole.place), shape)
            elif whole.place[0].start <= stored.expert < whole.place[0].stop:
                own = whole.local[stored.expert - whole.place[0].start]
                found[stored.name] = cls(own, stored.place(whole.place), shape)
        return found

    def size(self) -> torch.Size:
        """Of the whole: compared with the file's before anything is read."""
        return self.shape

    def _chunk(self) -> ChunkStorageMetadata:
        offsets = torch.Size(part.start for part in self.place)
        return ChunkStorageMetadata(offsets, torch.Size(part.stop - part.start for part in self.place))

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        chunk = self._chunk()
        return [chunk] if math.prod(chunk.sizes) else []

    def __create_write_items__(self, name: str, value: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(self.local), self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]


class SavePlanner(DefaultSavePlanner):
    """Plans the saving of `Part`s: each value is written by one of the ranks that hold it."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        part: Part = self.state_dict[index.fqn]
        return part.local


class LoadPlanner(DefaultLoadPlanner):
    """Plans the filling of `Part`s, in place."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Any = None, is_coordinator: bool = False) -> None:
        # torch's own drops what is not a tensor.
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        part: Part = self.state_dict[index.fqn]
        return part.local
