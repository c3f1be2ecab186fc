"""Loads weights from a trainer's weight server into a generator in another process: all of them, intact, or none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lockstep.model import Decoder
from lockstep.model.shard import local_values
from lockstep.observe import log
from lockstep.parallel import World
from lockstep.parallel.messages import from_all
from lockstep.rl.generators.channel import Closed, call
from lockstep.rl.weights.checksum import checksum
from lockstep.rl.weights.server import WeightManifest
from lockstep.rl.weights.shard_slices import (
    ShardSlice,
    differing,
    first_copies,
    intersection,
    read_slice,
    read_slices,
    shard_slice_of,
    view_at,
    volume,
)

TRIES = 3
"""Attempts to read a version before damage counts as an error."""
MESSAGE = 1 << 24
"""Most bytes of a piece; larger ones are split by rows, so that sending and receiving overlap."""
Outcome = Literal["loaded", "late", "damaged", "unreachable"]


@dataclass(frozen=True)
class LoadResult:
    """The result of loading a version. Unless it is "loaded", the model keeps its previous weights.

    "late": the trainer has freed these; load a newer version. "damaged": checksums differ. "unreachable": a rank of the
    trainer cannot be read.
    """

    version: int
    outcome: Outcome
    problem: str = ""
    """What was wrong, with the names of tensors and ranks; empty if loaded."""


class _Failed(Exception):
    """A version cannot be read; as in `LoadResult`."""

    def __init__(self, outcome: str, problem: str):
        super().__init__(problem)
        self.outcome = outcome


class WeightReader:
    """Loads weights into `model`, which has a shard of each tensor on every process of a replica.

    The processes of a replica (the tensor group of `world`) create it, and call its methods, together. key: of the
    weight server.
    """

    def __init__(self, model: Decoder, world: World, key: bytes):
        self._model, self._group, self._key = model, world.tensor_group, key
        self._local = {name: local_values(parameter.detach()) for name, parameter in model.named_parameters()}
        self._shards = {name: shard_slice_of(parameter) for name, parameter in model.named_parameters()}
        self._names = list(self._shards)
        per_process = [read_slices(parts) for parts in self._gather(self._shards)]
        self._firsts = torch.tensor(first_copies(per_process, self._names))
        self._arrived: dict[str, Tensor] = {}
        """Memory for what is read of a version; reused, as the system clears new memory."""
        self._loaded: WeightManifest = {"id": "", "since": {}}
        """Loaded last: tensors that have not changed since are not read again."""

    def load(self, manifest: WeightManifest) -> LoadResult:
        """Replaces the model's weights by those of `manifest` if all of them arrive intact on every process."""
        for attempt in range(1, TRIES + 1):
            outcome, problem = self._read(manifest)
            if outcome == "loaded":
                self._copy_into_model()
                self._loaded = manifest
                break
            log.warning("weights version %d: %s (try %d of %d)", manifest["version"], problem, attempt, TRIES)
            if outcome == "late":
                break  # another try would not help
            self._loaded = {"id": "", "since": {}}
        return LoadResult(manifest["version"], outcome, problem)

    def _read(self, manifest: WeightManifest) -> tuple[Outcome, str]:
        """Reads what this process needs; returns the outcome for the whole replica, and the problem."""
        buffers = self._arrived
        since = self._loaded["since"] if self._loaded["id"] == manifest["id"] else {}
        self._arrived = {
            name: buffers[name] if name in buffers else torch.empty_like(part, memory_format=torch.contiguous_format)
            for name, part in self._local.items()
            if manifest["since"][name] != since.get(name)
        }
        failed: list[str] = []
        try:
            for rank, description in enumerate(manifest["ranks"]):
                self._read_rank(rank, description, manifest["sequence"])
        except _Failed as error:
            failed = [error.outcome, str(error)]
        sums = [] if failed else [self._checksum(name) for name in self._names]
        per_process = self._gather([failed, sums])
        for failure, _ in per_process:
            if failure:
                return failure[0], failure[1]
        received = torch.tensor([sums for _, sums in per_process])
        expected = torch.tensor([manifest["sums"][name] for name in self._names])
        differs = differing(received, self._firsts, expected).tolist()
        damaged = [name for name, different in zip(self._names, differs) if different]
        if damaged:
            more = f" and {len(damaged) - 1} more" if damaged[1:] else ""
            return "damaged", f"{damaged[0]}{more} did not arrive intact"
        return "loaded", ""

    def _read_rank(self, rank: int, description: Mapping[str, Any], sequence: int) -> None:
        """Reads what this process needs of a trainer's rank. Raises _Failed."""
        pieces = list(self._pieces(description["parts"]))
        if not pieces:
            return
        try:
            host, port = description["address"]
            with closing(call(host, port, self._key)) as channel:
                channel.send({"sequence": sequence, "pieces": pieces})
                for name, shard_slice in pieces:
                    kind, content = channel.receive()
                    if kind == "late":
                        raise _Failed("late", f"rank {rank} of the trainer has freed them for newer weights")
                    target = view_at(self._arrived[name], shard_slice, self._shards[name])
                    target.copy_(torch.frombuffer(content, dtype=target.dtype).view(target.shape))
        except Closed as error:
            raise _Failed("unreachable", f"cannot read from rank {rank} of the trainer: {error}") from error

    def _pieces(self, parts: list[Any]) -> Iterator[tuple[str, ShardSlice]]:
        """What this process needs of a rank's shards."""
        for name, bounds in parts:
            shard_slice = intersection(read_slice(bounds), self._shards[name])
            if name in self._arrived and shard_slice is not None:
                (first, stop), *rest = shard_slice
                rows = max(1, MESSAGE // (volume(tuple(rest)) * self._model.dtype.itemsize))
                for start in range(first, stop, rows):
                    yield name, ((start, min(stop, start + rows)), *rest)

    def _checksum(self, name: str) -> int:
        part, shape = self._arrived.get(name, self._local[name]), self._model.get_parameter(name).shape
        return int(checksum(part, self._shards[name], shape))

    @torch.no_grad()
    def _copy_into_model(self) -> None:
        for name, arrived in self._arrived.items():
            self._local[name].copy_(arrived)

    def _gather(self, value: Any) -> list[Any]:
        return [value] if self._group is None else from_all(value, self._group)
