"""Weights laid out by the trainer for generators in separate processes, which read them whenever they are ready.

Each of the trainer's ranks writes its parts, rounded to the generators' dtype, into memory that processes on its host
can read, and serves them by TCP to other hosts. So a generator can join, leave or be killed at any time: the trainer
waits for none, and none is in a collective with it. Slots are written in turn, so that writing the next version does
not disturb a reader of this one.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.config import ActorsConfig
from lockstep.errors import one_line
from lockstep.model.shard import local_values
from lockstep.observe import log
from lockstep.parallel import World
from lockstep.rl.generators.channel import Channel, Closed, Listener
from lockstep.rl.weights.server_memory import ServerMemory
from lockstep.rl.weights.shard_slices import (
    at,
    checksum_of,
    common,
    holders_of,
    local_shard_of,
    offsets,
    plain_parts,
    read_parts,
    read_shard_slice,
    volume,
)

READER_SECONDS = 60
"""How long a reader may request nothing, or take nothing of what it requested."""
WeightManifest = dict[str, Any]
"""Where the weights of one version are, JSON-able.

`version`; `turn` and `slot`, where they are; `sums`: each tensor's checksum; `since`: for tensors without a gradient,
the turn since which they have been bitwise identical; `server`: what is the same for all versions, namely its `id`, the
`dtype`, each tensor's shape in `shapes`, and for each of the `ranks` the `address` at which it serves, the `place` of
its memory (process, file and name there, or null), the bytes of a slot in `size`, and its `parts`: [name, shard slice,
offset in a slot].
"""


class WeightServer:
    """The weights of a run, for readers in other processes (`WeightReader`).

    All ranks of `world` create it, and call its methods, together. `tensors`: by the model's names; each rank gives
    what it has. `dtype` is the generators'. `host`: the address of this host for readers on other hosts, which must
    know the `key`. `slots`: versions held at a time. Raises UserError if it cannot listen there.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        world: World,
        key: bytes,
        host: str = "127.0.0.1",
        slots: int = 2,
    ):
        self._tensors, self._dtype, self._world, self._slots = tensors, dtype, world, slots
        held = {name: local_shard_of(tensor) for name, tensor in tensors.items()}
        everyone = [read_parts(parts) for parts in world.gather(plain_parts(held))]
        holders = holders_of(everyone)
        # A part held by several ranks is laid out by the first of them.
        self._held = {name: part for name, part in held.items() if holders[name][part.shard_slice][0] == world.rank}
        parts = {name: local_values(tensors[name].detach()) for name in self._held}
        self._offsets, size = offsets({name: part.numel() * dtype.itemsize for name, part in parts.items()})
        self._memory = ServerMemory.created(size, slots)
        frozen = [name for name in self._held if not tensors[name].requires_grad]
        self._since = dict.fromkeys(frozen, 0)
        """As in an edition. Compared at each publication: a router's choice bias has no gradient, but changes."""
        self._there: list[dict[str, tuple[int, int]]] = [{} for _ in range(slots)]
        """For each slot's copies of these: the turn since which they are unchanged, and their checksum."""
        self._server = _Server(self, Listener(key, host))
        self._turn = 0
        own = {
            "address": list(self._server.address),
            "place": self._memory.place,
            "size": size,
            "slots": slots,
            "parts": [[name, part.shard_slice, self._offsets[name]] for name, part in self._held.items()],
        }
        self._description = {
            "id": world.from_main(lambda: secrets.token_hex(8)),
            "dtype": str(dtype).removeprefix("torch."),
            "shapes": {name: part.shape for parts_of in everyone for name, part in parts_of.items()},
            "ranks": world.gather(own),
        }

    @torch.no_grad()
    def publish(self, version: int) -> WeightManifest:
        """Lays out the current weights; returns, on every rank, what readers need to read them."""
        self._turn += 1
        slot = self._turn % self._slots
        self._memory.set_mark(slot, -self._turn)
        sums = {name: self._lay_out(name, slot) for name in self._held}
        self._memory.set_mark(slot, self._turn)
        everyone = self._world.gather([sums, self._since])
        return {
            "version": version,
            "turn": self._turn,
            "slot": slot,
            "sums": _added([sums for sums, _ in everyone]),
            "since": _latest([since for _, since in everyone]),
            "server": self._description,
        }

    def _lay_out(self, name: str, slot: int) -> int:
        """Writes a part into the slot and returns its checksum."""
        values = local_values(self._tensors[name].detach())
        if name in self._since:
            values = values.to("cpu", self._dtype).contiguous()
            if self._turn == 1 or not _same_bits(values, self._room(name, (self._turn - 1) % self._slots)):
                self._since[name] = self._turn
            since, checksum = self._there[slot].get(name, (0, 0))
            if since == self._since[name]:
                return checksum
        room = self._room(name, slot).copy_(values)
        checksum = int(checksum_of(room, self._held[name]))
        if name in self._since:
            self._there[slot][name] = self._since[name], checksum
        return checksum

    def _room(self, name: str, slot: int) -> Tensor:
        return self._memory.room(slot, self._offsets[name], self._held[name].shard_slice, self._dtype)

    def serve(self, request: Any) -> tuple[list[int], list[memoryview]]:
        """The slot's mark before and after the pieces were read, and the pieces; for the serving threads.

        Raises LookupError, TypeError or ValueError for an invalid request.
        """
        slot, asked = (
            request["slot"],
            [(name, read_shard_slice(shard_slice)) for name, shard_slice in request["pieces"]],
        )
        if slot not in range(self._slots):
            raise ValueError("no such slot")
        for name, shard_slice in asked:
            if (
                len(shard_slice) != len(part := self._held[name].shard_slice)
                or common(shard_slice, part) != shard_slice
            ):
                raise ValueError("not a piece of a part")
        # At most the slot's size, in case a piece is requested over and over.
        if sum(volume(shard_slice) for _, shard_slice in asked) * self._dtype.itemsize > self._memory.size:
            raise ValueError("more bytes than the slot has")
        before = self._memory.mark(slot)
        pieces = []
        for name, shard_slice in asked:
            part = self._held[name].shard_slice
            room = self._memory.room(slot, self._offsets[name], part, self._dtype)
            # A copy: signed data must not change while it is sent.
            piece = at(room, shard_slice, part).clone(memory_format=torch.contiguous_format)
            pieces.append(piece.view(-1).view(torch.uint8).numpy().data)
        return [before, self._memory.mark(slot)], pieces

    def close(self) -> None:
        """Ends all threads and connections, and frees the memory."""
        self._server.close()
        self._memory.close()


class _Server:
    """Threads that serve a shelf: one that accepts connections, and one for each connection."""

    def __init__(self, weight_server: WeightServer, listener: Listener):
        self._weight_server, self._listener = weight_server, listener
        self.address = listener.address
        self._lock, self._callers, self._closed = threading.Lock(), dict[threading.Thread, socket.socket](), False
        self._thread = threading.Thread(target=self._answer, name="weight server", daemon=True)
        self._thread.start()

    def _answer(self) -> None:
        with contextlib.suppress(Closed):
            while True:
                caller = self._listener.accept()
                thread = threading.Thread(target=self._talk, args=(caller,), name="weight server", daemon=True)
                with self._lock:
                    self._callers[thread] = caller
                thread.start()

    def _talk(self, caller: socket.socket) -> None:
        channel: Channel | None = None
        try:
            channel = self._listener.greet(caller)
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", READER_SECONDS, 0))
            while True:
                request, _ = channel.receive(READER_SECONDS)
                marks, pieces = self._weight_server.serve(request)
                channel.send(marks, *pieces)
        except (Closed, TimeoutError):
            pass  # the reader is done, or gone, or not part of this run
        except Exception as error:  # an invalid request: its connection ends
            log.warning("a reader of the weights was rejected: %s", one_line(repr(error)))
        finally:
            caller.close()
            with self._lock:
                self._callers.pop(threading.current_thread(), None)

    def close(self) -> None:
        self._listener.close()
        self._thread.join()  # no callers are added from here on
        with self._lock:
            callers = dict(self._callers)
        for thread, caller in callers.items():
            with contextlib.suppress(OSError):
                caller.shutdown(socket.SHUT_RDWR)
            thread.join()


def versions_laid_out(actors: ActorsConfig) -> int:
    """The newest, one that may still be read, and those that generators read late, as they finish requests first."""
    return 2 + (actors.max_staleness if actors.on_update == "finish" else 0)


def _added(sums: list[dict[str, int]]) -> dict[str, int]:
    """The sum of each tensor's parts, wrapped to int64."""
    names = {name for of_rank in sums for name in of_rank}
    return {name: _wrapped(sum(of_rank.get(name, 0) for of_rank in sums)) for name in sorted(names)}


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))  # not as numbers: -0 equals 0, and NaN nothing


def _latest(turns: list[dict[str, int]]) -> dict[str, int]:
    """The latest turn of each tensor's parts."""
    names = {name for of_rank in turns for name in of_rank}
    return {name: max(of_rank.get(name, 0) for of_rank in turns) for name in sorted(names)}


def _wrapped(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63
