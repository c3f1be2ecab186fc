"""Weights read from a trainer's shelf into a generator in another process: all of them, intact, or none."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.model import Decoder
from lockstep.model.shard import local_part
from lockstep.observe import log
from lockstep.parallel import World
from lockstep.parallel.messages import from_all
from lockstep.rl.generators.channel import Channel, Closed, call
from lockstep.rl.weights.server import WeightManifest
from lockstep.rl.weights.server_memory import ServerMemory, place_of
from lockstep.rl.weights.shard_slices import (
    LocalShard,
    ShardSlice,
    at,
    checksum_of,
    common,
    differing,
    first_copies,
    local_shard_of,
    plain_parts,
    read_parts,
    read_shard_slice,
    volume,
)

TRIES = 3
"""How often weights are read before a damaged read counts as an error."""
MESSAGE = 1 << 24
"""Most bytes per request over TCP."""


@dataclass(frozen=True)
class Taken:
    """The result of reading an edition. Unless it was "taken", the model keeps the weights that it had before.

    "late": newer weights have overwritten these; read a newer edition. "torn": the trainer ended, or was killed, while
    writing them. "damaged": they did not arrive as written. "unreachable": a rank of the trainer cannot be read.
    """

    version: int
    outcome: Literal["taken", "late", "torn", "damaged", "unreachable"]
    said: str = ""
    """A sentence on what was wrong, which names tensors and ranks; empty if all were taken."""


@dataclass(frozen=True)
class _Piece:
    """What one process reads of one part."""

    name: str
    shard_slice: ShardSlice
    part: ShardSlice
    offset: int


class _Failed(Exception):
    """Why an edition cannot be read, as in `Taken`."""

    def __init__(self, outcome: str, said: str):
        super().__init__(said)
        self.outcome = outcome


class WeightReader:
    """Reads editions of a trainer's shelf into `model`, which has a part of each tensor on every process of a replica.

    The processes of a replica (the tensor group of `world`) create it, and call its methods, together. `key`: the
    shelf's.
    """

    def __init__(self, model: Decoder, world: World, key: bytes):
        self._model, self._group, self._key = model, world.tensor_group, key
        self._own = {name: local_part(parameter.detach())[0] for name, parameter in model.named_parameters()}
        self._wanted = {name: local_shard_of(parameter) for name, parameter in model.named_parameters()}
        self._names = list(self._wanted)
        everyone = [read_parts(parts) for parts in self._gather(plain_parts(self._wanted))]
        self._firsts = torch.tensor(first_copies(everyone, self._names))
        self._arrived: dict[str, Tensor] = {}
        """Memory for what is read of an edition; kept, as new memory would have to be cleared each time."""
        self._since: dict[str, int] = {}
        """`since` of the last edition taken, for this shelf's tensors that the model has."""
        self._sources: list[_Source] = []
        self._weight_server = ""

    def take(self, manifest: WeightManifest) -> Taken:
        """Replaces the model's weights by those of `manifest`, if all of them arrive intact on every process.

        Raises UserError if they belong to another model, or have another dtype.
        """
        if manifest["server"]["id"] != self._weight_server:
            self._open(manifest["server"])
        self._make_room(manifest)
        for attempt in range(1, TRIES + 1):
            outcome, said = self._read(manifest)
            if outcome == "taken":
                self._keep()
                self._since = manifest["since"]
                return Taken(manifest["version"], outcome)
            log.warning("weights version %d: %s (try %d of %d)", manifest["version"], said, attempt, TRIES)
            if outcome in ("late", "torn"):
                break  # another try would not help
            self._since = {}
            self._make_room(manifest)
        return Taken(manifest["version"], outcome, said)

    def close(self) -> None:
        """Releases the trainer's memory."""
        for source in self._sources:
            source.close()
        self._sources, self._weight_server = [], ""

    def _open(self, weight_server: Mapping[str, Any]) -> None:
        self._refuse_another(weight_server)
        self.close()
        self._sources = [
            _Source(rank, plain, self._pieces(plain["parts"]), self._model.dtype, self._key)
            for rank, plain in enumerate(weight_server["ranks"])
        ]
        self._weight_server = weight_server["id"]
        self._since = {}

    def _make_room(self, manifest: WeightManifest) -> None:
        """For all tensors but those that the model already has."""
        rooms, since = self._arrived, manifest["since"]
        self._arrived = {
            name: rooms[name] if name in rooms else torch.empty_like(part, memory_format=torch.contiguous_format)
            for name, part in self._own.items()
            if name not in since or since[name] != self._since.get(name)
        }

    def _refuse_another(self, weight_server: Mapping[str, Any]) -> None:
        problems = []
        own = str(self._model.dtype).removeprefix("torch.")
        if weight_server["dtype"] != own:
            problems.append(f"they are {weight_server['dtype']}, but the generator is {own}")
        covered = dict.fromkeys(weight_server["shapes"], 0)
        for rank in weight_server["ranks"]:
            for name, shard_slice, _ in rank["parts"]:
                covered[name] += volume(read_shard_slice(shard_slice))
        for name in sorted({*self._names, *weight_server["shapes"]}):
            there = tuple(weight_server["shapes"][name]) if name in weight_server["shapes"] else None
            here = self._wanted[name].shape if name in self._wanted else None
            if there != here:
                found = [str(list(shape)) if shape is not None else "missing" for shape in (there, here)]
                problems.append(f"{name} is {found[0]} in the trainer, but {found[1]} in the generator")
            elif covered[name] != torch.Size(there or ()).numel():
                problems.append(
                    f"the trainer's ranks have {covered[name]} elements of {name}, too few or some of them twice"
                )
        if problems:
            more = f", and {len(problems) - 1} more" if problems[1:] else ""
            raise UserError(
                f"the trainer's weights do not fit this generator: {problems[0]}{more}; start the generator with the "
                "model and dtype of the run"
            )

    def _pieces(self, parts: list[Any]) -> list[_Piece]:
        """What this process needs of a rank's parts."""
        pieces = []
        for name, plain, offset in parts:
            part = read_shard_slice(plain)
            if (shard_slice := common(part, self._wanted[name].shard_slice)) is not None:
                pieces.append(_Piece(name, shard_slice, part, offset))
        return pieces

    def _read(self, manifest: WeightManifest) -> tuple[Literal["taken", "late", "torn", "damaged", "unreachable"], str]:
        """Reads what this process needs; returns the joint result of all processes of the replica."""
        failed: list[str] = []
        try:
            for source in self._sources:
                source.read(manifest, self._arrived, self._wanted)
        except _Failed as error:
            failed = [error.outcome, str(error)]
        sums = [] if failed else [self._sum(name) for name in self._names]
        everyone = self._gather([failed, sums])
        for problem, _ in everyone:
            if problem:
                return problem[0], problem[1]
        of_ranks = torch.tensor([sums for _, sums in everyone])
        expected = torch.tensor([manifest["sums"][name] for name in self._names])
        damaged = [
            name for name, other in zip(self._names, differing(of_ranks, self._firsts, expected).tolist()) if other
        ]
        if damaged:
            more = f" and {len(damaged) - 1} more" if damaged[1:] else ""
            return "damaged", f"{damaged[0]}{more} did not arrive intact"
        return "taken", ""

    def _sum(self, name: str) -> int:
        return int(checksum_of(self._arrived.get(name, self._own[name]), self._wanted[name]))

    @torch.no_grad()
    def _keep(self) -> None:
        for name, arrived in self._arrived.items():
            self._own[name].copy_(arrived)

    def _gather(self, value: Any) -> list[Any]:
        return [value] if self._group is None else from_all(value, self._group)


class _Source:
    """One rank of the trainer as a source: its memory if that can be opened, else TCP."""

    def __init__(self, rank: int, plain: Mapping[str, Any], pieces: list[_Piece], dtype: torch.dtype, key: bytes):
        self._rank, self._pieces, self._dtype, self._key = rank, pieces, dtype, key
        self._host, self._port = plain["address"]
        self._memory: ServerMemory | None = None
        if pieces and (place := place_of(plain["place"])) is not None:
            # Impossible if it is on another host, or in a container whose processes are not visible.
            with contextlib.suppress(OSError):
                self._memory = ServerMemory.opened(place, plain["size"], plain["slots"])

    def read(self, manifest: WeightManifest, arrived: Mapping[str, Tensor], wanted: Mapping[str, LocalShard]) -> None:
        """Reads what is in `arrived`. Raises _Failed."""
        pieces = [piece for piece in self._pieces if piece.name in arrived]
        if not pieces:
            return
        read = self._by_memory if self._memory is not None else self._by_tcp
        for piece, content in read(manifest, pieces):
            at(arrived[piece.name], piece.shard_slice, wanted[piece.name].shard_slice).copy_(content)

    def _by_memory(self, manifest: WeightManifest, pieces: list[_Piece]) -> Iterator[tuple[_Piece, Tensor]]:
        assert self._memory is not None
        self._check(self._memory.mark(manifest["slot"]), manifest)
        for piece in pieces:
            room = self._memory.room(manifest["slot"], piece.offset, piece.part, self._dtype)
            yield piece, at(room, piece.shard_slice, piece.part)
        self._check(self._memory.mark(manifest["slot"]), manifest)

    def _by_tcp(self, manifest: WeightManifest, pieces: list[_Piece]) -> Iterator[tuple[_Piece, Tensor]]:
        channel: Channel | None = None
        try:
            channel = call(self._host, self._port, self._key)
            prefetcher = _messages(pieces, self._dtype)
            asked: deque[list[_Piece]] = deque()
            while True:
                # One message is requested ahead: it is signed there while this one is checked here.
                while len(asked) < 2 and (message := next(prefetcher, None)) is not None:
                    channel.send(
                        {"slot": manifest["slot"], "pieces": [[piece.name, piece.shard_slice] for piece in message]}
                    )
                    asked.append(message)
                if not asked:
                    break
                message = asked.popleft()
                marks, content = channel.receive()
                for mark in marks:
                    self._check(mark, manifest)
                start = 0
                for piece in message:
                    shape = [stop - first for first, stop in piece.shard_slice]
                    end = start + volume(piece.shard_slice) * self._dtype.itemsize
                    yield piece, torch.frombuffer(content, dtype=torch.uint8)[start:end].view(self._dtype).view(shape)
                    start = end
        except Closed as error:
            raise _Failed("unreachable", f"cannot read from rank {self._rank} of the trainer: {error}") from error
        finally:
            if channel is not None:
                channel.close()

    def _check(self, mark: int, manifest: WeightManifest) -> None:
        if mark == manifest["turn"]:
            return
        if abs(mark) > manifest["turn"]:
            raise _Failed("late", f"rank {self._rank} of the trainer has overwritten them with newer weights")
        raise _Failed("torn", f"rank {self._rank} of the trainer has not finished writing them")

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def _messages(pieces: list[_Piece], dtype: torch.dtype) -> Iterator[list[_Piece]]:
    """The pieces, in messages of at most `MESSAGE` bytes; large pieces are split by rows."""
    together: list[_Piece] = []
    size = 0
    for piece in (small for large in pieces for small in _cut(large, dtype)):
        length = volume(piece.shard_slice) * dtype.itemsize
        if together and size + length > MESSAGE:
            yield together
            together, size = [], 0
        together.append(piece)
        size += length
    yield together


def _cut(piece: _Piece, dtype: torch.dtype) -> Iterator[_Piece]:
    (first, stop), *rest = piece.shard_slice
    rows = max(1, MESSAGE // (volume(tuple(rest)) * dtype.itemsize))
    for start in range(first, stop, rows):
        shard_slice = ((start, min(stop, start + rows)), *rest)
        yield _Piece(piece.name, shard_slice, piece.part, piece.offset)
