"""Loads weights from a trainer's weight server into a generator in another process: all of them, intact, or none."""

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
from lockstep.rl.weights.server_memory import ServerMemory, handle_of
from lockstep.rl.weights.shard_slices import (
    LocalShard,
    ShardSlice,
    checksum_of,
    differing,
    first_copies,
    intersection,
    local_shard_of,
    plain_parts,
    read_parts,
    read_shard_slice,
    view_at,
    volume,
)

TRIES = 3
"""Attempts to read a version before damage counts as an error."""
MESSAGE = 1 << 24
"""Most bytes per request over TCP."""
Outcome = Literal["loaded", "late", "torn", "damaged", "unreachable"]


@dataclass(frozen=True)
class LoadResult:
    """The result of loading a version. Unless it is "loaded", the model keeps its previous weights.

    "late": newer weights have overwritten these; load a newer version. "torn": the trainer ended, or was killed, while
    writing them. "damaged": checksums differ. "unreachable": a rank of the trainer cannot be read.
    """

    version: int
    outcome: Outcome
    problem: str = ""
    """What was wrong, with the names of tensors and ranks; empty if loaded."""


@dataclass(frozen=True)
class _Piece:
    """What this process reads from one rank's shard of a tensor."""

    name: str
    shard_slice: ShardSlice
    shard: ShardSlice
    """Of the rank."""
    offset: int
    """Of the shard in the rank's slot, in bytes."""


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
        self._local = {name: local_part(parameter.detach())[0] for name, parameter in model.named_parameters()}
        self._shards = {name: local_shard_of(parameter) for name, parameter in model.named_parameters()}
        self._names = list(self._shards)
        per_process = [read_parts(parts) for parts in self._gather(plain_parts(self._shards))]
        self._firsts = torch.tensor(first_copies(per_process, self._names))
        self._arrived: dict[str, Tensor] = {}
        """Memory for what is read of a version; reused, as the system clears new memory."""
        self._since: dict[str, int] = {}
        """`since` in the manifest loaded last: these tensors need not be read again if it has not changed."""
        self._sources: list[_Source] = []
        self._server_id = ""

    def load(self, manifest: WeightManifest) -> LoadResult:
        """Replaces the model's weights by those of `manifest` if all of them arrive intact on every process.

        Raises UserError if they belong to another model, or have another dtype.
        """
        if manifest["server"]["id"] != self._server_id:
            self._open(manifest["server"])
        self._allocate(manifest)
        for attempt in range(1, TRIES + 1):
            outcome, problem = self._read(manifest)
            if outcome == "loaded":
                self._copy_into_model()
                self._since = manifest["since"]
                return LoadResult(manifest["version"], outcome)
            log.warning("weights version %d: %s (try %d of %d)", manifest["version"], problem, attempt, TRIES)
            if outcome in ("late", "torn"):
                break  # another try would not help
            self._since = {}
            self._allocate(manifest)
        return LoadResult(manifest["version"], outcome, problem)

    def close(self) -> None:
        """Unmaps the trainer's memory."""
        for source in self._sources:
            source.close()
        self._sources, self._server_id = [], ""

    def _open(self, weight_server: Mapping[str, Any]) -> None:
        self._refuse_other_model(weight_server)
        self.close()
        self._sources = [
            _Source(rank, description, self._pieces(description["parts"]), self._model.dtype, self._key)
            for rank, description in enumerate(weight_server["ranks"])
        ]
        self._server_id = weight_server["id"]
        self._since = {}

    def _allocate(self, manifest: WeightManifest) -> None:
        """Memory for all tensors except those that the model already has."""
        buffers, since = self._arrived, manifest["since"]
        self._arrived = {
            name: buffers[name] if name in buffers else torch.empty_like(part, memory_format=torch.contiguous_format)
            for name, part in self._local.items()
            if name not in since or since[name] != self._since.get(name)
        }

    def _refuse_other_model(self, weight_server: Mapping[str, Any]) -> None:
        problems = []
        dtype = str(self._model.dtype).removeprefix("torch.")
        if weight_server["dtype"] != dtype:
            problems.append(f"they are {weight_server['dtype']}, but the generator is {dtype}")
        covered = dict.fromkeys(weight_server["shapes"], 0)
        for rank in weight_server["ranks"]:
            for name, shard_slice, _ in rank["parts"]:
                covered[name] += volume(read_shard_slice(shard_slice))
        for name in sorted({*self._names, *weight_server["shapes"]}):
            theirs = tuple(weight_server["shapes"][name]) if name in weight_server["shapes"] else None
            ours = self._shards[name].shape if name in self._shards else None
            if theirs != ours:
                shapes = [str(list(shape)) if shape is not None else "missing" for shape in (theirs, ours)]
                problems.append(f"{name} is {shapes[0]} in the trainer, but {shapes[1]} in the generator")
            elif covered[name] != torch.Size(theirs or ()).numel():
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
        """What this process needs of a rank's shards."""
        pieces = []
        for name, bounds, offset in parts:
            shard = read_shard_slice(bounds)
            if (shard_slice := intersection(shard, self._shards[name].shard_slice)) is not None:
                pieces.append(_Piece(name, shard_slice, shard, offset))
        return pieces

    def _read(self, manifest: WeightManifest) -> tuple[Outcome, str]:
        """Reads what this process needs; returns the outcome for the whole replica, and the problem."""
        failed: list[str] = []
        try:
            for source in self._sources:
                source.read(manifest, self._arrived, self._shards)
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

    def _checksum(self, name: str) -> int:
        return int(checksum_of(self._arrived.get(name, self._local[name]), self._shards[name]))

    @torch.no_grad()
    def _copy_into_model(self) -> None:
        for name, arrived in self._arrived.items():
            self._local[name].copy_(arrived)

    def _gather(self, value: Any) -> list[Any]:
        return [value] if self._group is None else from_all(value, self._group)


class _Source:
    """A rank of the trainer, read through shared memory if that can be opened, else by TCP."""

    def __init__(self, rank: int, description: Mapping[str, Any], pieces: list[_Piece], dtype: torch.dtype, key: bytes):
        """description: as in `WeightManifest`, under `ranks`."""
        self._rank, self._pieces, self._dtype, self._key = rank, pieces, dtype, key
        self._host, self._port = description["address"]
        self._memory: ServerMemory | None = None
        if pieces and (handle := handle_of(description["handle"])) is not None:
            # Fails on another host, and if a container hides the trainer's processes.
            with contextlib.suppress(OSError):
                self._memory = ServerMemory.opened(handle, description["size"], description["slots"])

    def read(self, manifest: WeightManifest, arrived: Mapping[str, Tensor], shards: Mapping[str, LocalShard]) -> None:
        """Fills the tensors in `arrived`, this process's `shards`. Raises _Failed."""
        pieces = [piece for piece in self._pieces if piece.name in arrived]
        if not pieces:
            return
        read = self._by_memory if self._memory is not None else self._by_tcp
        for piece, content in read(manifest, pieces):
            view_at(arrived[piece.name], piece.shard_slice, shards[piece.name].shard_slice).copy_(content)

    def _by_memory(self, manifest: WeightManifest, pieces: list[_Piece]) -> Iterator[tuple[_Piece, Tensor]]:
        assert self._memory is not None
        self._check(self._memory.mark(manifest["slot"]), manifest)
        for piece in pieces:
            view = self._memory.view(manifest["slot"], piece.offset, piece.shard, self._dtype)
            yield piece, view_at(view, piece.shard_slice, piece.shard)
        self._check(self._memory.mark(manifest["slot"]), manifest)

    def _by_tcp(self, manifest: WeightManifest, pieces: list[_Piece]) -> Iterator[tuple[_Piece, Tensor]]:
        channel: Channel | None = None
        try:
            channel = call(self._host, self._port, self._key)
            messages = _messages(pieces, self._dtype)
            requested: deque[list[_Piece]] = deque()
            while True:
                # Requests one message ahead: the trainer copies it while this side reads the previous one.
                while len(requested) < 2 and (message := next(messages, None)) is not None:
                    channel.send(
                        {"slot": manifest["slot"], "pieces": [[piece.name, piece.shard_slice] for piece in message]}
                    )
                    requested.append(message)
                if not requested:
                    break
                message = requested.popleft()
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
        if mark == manifest["sequence"]:
            return
        if abs(mark) > manifest["sequence"]:
            raise _Failed("late", f"rank {self._rank} of the trainer has overwritten them with newer weights")
        raise _Failed("torn", f"rank {self._rank} of the trainer has not finished writing them")

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def _messages(pieces: list[_Piece], dtype: torch.dtype) -> Iterator[list[_Piece]]:
    """The pieces, in messages of at most `MESSAGE` bytes; large pieces are split by rows."""
    message: list[_Piece] = []
    size = 0
    for piece in (part for whole in pieces for part in _split(whole, dtype)):
        length = volume(piece.shard_slice) * dtype.itemsize
        if message and size + length > MESSAGE:
            yield message
            message, size = [], 0
        message.append(piece)
        size += length
    yield message


def _split(piece: _Piece, dtype: torch.dtype) -> Iterator[_Piece]:
    (first, stop), *rest = piece.shard_slice
    rows = max(1, MESSAGE // (volume(tuple(rest)) * dtype.itemsize))
    for start in range(first, stop, rows):
        shard_slice = ((start, min(stop, start + rows)), *rest)
        yield _Piece(piece.name, shard_slice, piece.shard, piece.offset)
