"""The trainer's weights for generators in separate processes, which read them whenever they are ready.

Each training rank writes its shards, cast to the generators' dtype, into memory that processes on its host can read,
and serves them by TCP to other hosts. Generators can join, leave or be killed at any time: the trainer waits for none,
and none takes part in its collectives. Versions go to alternating slots, so that writing the next one does not disturb
readers of this one.
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
    checksum_of,
    intersection,
    local_shard_of,
    offsets,
    owners_of,
    plain_parts,
    read_parts,
    read_shard_slice,
    view_at,
    volume,
)

READER_SECONDS = 60
"""Timeout for a reader's next request, and for it to receive the response."""
WeightManifest = dict[str, Any]
"""Where to read one version of the weights; JSON-able.

`version`; `sequence`: number of the publication; `slot` that it was written to; `sums`: each tensor's checksum;
`since`: for tensors without a gradient, the sequence number since which their bits have not changed; `server`: what is
the same for all versions, namely its `id`, the `dtype`, each tensor's shape in `shapes`, and for each of the `ranks`
the `address` that it listens on, the `handle` of its memory (process, file and name there, or null), the bytes of a
slot in `size`, the number of `slots`, and its `parts`: [name, shard slice, offset in a slot].
"""


class WeightServer:
    """Publishes a run's weights to readers in other processes (`WeightReader`).

    All ranks of `world` create it, and call its methods, together. tensors: this rank's, by the model's names. dtype:
    the generators'. key: readers on other hosts must know it. host: this host's address for them. slots: versions that
    can be read at a time. Raises UserError if it cannot listen there.
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
        local = {name: local_shard_of(tensor) for name, tensor in tensors.items()}
        per_rank = [read_parts(parts) for parts in world.gather(plain_parts(local))]
        owners = owners_of(per_rank)
        # Of replicated shards, the first rank's is published.
        self._shards = {name: part for name, part in local.items() if owners[name][part.shard_slice][0] == world.rank}
        parts = {name: local_values(tensors[name].detach()) for name in self._shards}
        self._offsets, size = offsets({name: part.numel() * dtype.itemsize for name, part in parts.items()})
        self._memory = ServerMemory.created(size, slots)
        frozen = [name for name in self._shards if not tensors[name].requires_grad]
        self._since = dict.fromkeys(frozen, 0)
        """As in the manifest. Compared at each publication: a router's choice bias has no gradient, but changes."""
        self._slot_checksums: list[dict[str, tuple[int, int]]] = [{} for _ in range(slots)]
        """Per slot, for its copies of these: the sequence number since which they are unchanged, and the checksum."""
        self._server = _Server(self, Listener(key, host))
        self._sequence = 0
        description = {
            "address": list(self._server.address),
            "handle": self._memory.handle,
            "size": size,
            "slots": slots,
            "parts": [[name, part.shard_slice, self._offsets[name]] for name, part in self._shards.items()],
        }
        self._description = {
            "id": world.from_main(lambda: secrets.token_hex(8)),
            "dtype": str(dtype).removeprefix("torch."),
            "shapes": {name: part.shape for parts_of_rank in per_rank for name, part in parts_of_rank.items()},
            "ranks": world.gather(description),
        }

    @torch.no_grad()
    def publish(self, version: int) -> WeightManifest:
        """Writes the current weights to the next slot; returns the manifest, on every rank."""
        self._sequence += 1
        slot = self._sequence % self._slots
        self._memory.set_mark(slot, -self._sequence)
        sums = {name: self._write(name, slot) for name in self._shards}
        self._memory.set_mark(slot, self._sequence)
        per_rank = self._world.gather([sums, self._since])
        return {
            "version": version,
            "sequence": self._sequence,
            "slot": slot,
            "sums": _added([sums for sums, _ in per_rank]),
            "since": _latest([since for _, since in per_rank]),
            "server": self._description,
        }

    def _write(self, name: str, slot: int) -> int:
        """Writes a shard to the slot and returns its checksum."""
        values = local_values(self._tensors[name].detach())
        if name in self._since:
            values = values.to("cpu", self._dtype).contiguous()
            if self._sequence == 1 or not _same_bits(values, self._view(name, (self._sequence - 1) % self._slots)):
                self._since[name] = self._sequence
            since, checksum = self._slot_checksums[slot].get(name, (0, 0))
            if since == self._since[name]:
                return checksum
        view = self._view(name, slot).copy_(values)
        checksum = int(checksum_of(view, self._shards[name]))
        if name in self._since:
            self._slot_checksums[slot][name] = self._since[name], checksum
        return checksum

    def _view(self, name: str, slot: int) -> Tensor:
        return self._memory.view(slot, self._offsets[name], self._shards[name].shard_slice, self._dtype)

    def serve(self, request: Any) -> tuple[list[int], list[memoryview]]:
        """The slot's mark before and after the pieces were copied, and the pieces; for the serving threads.

        Raises LookupError, TypeError or ValueError for an invalid request.
        """
        slot = request["slot"]
        requested = [(name, read_shard_slice(shard_slice)) for name, shard_slice in request["pieces"]]
        if slot not in range(self._slots):
            raise ValueError("no such slot")
        for name, shard_slice in requested:
            part = self._shards[name].shard_slice
            if len(shard_slice) != len(part) or intersection(shard_slice, part) != shard_slice:
                raise ValueError("not a piece of a part")
        # A request may repeat a piece.
        if sum(volume(shard_slice) for _, shard_slice in requested) * self._dtype.itemsize > self._memory.size:
            raise ValueError("more bytes than the slot has")
        before = self._memory.mark(slot)
        pieces = []
        for name, shard_slice in requested:
            part = self._shards[name].shard_slice
            view = self._memory.view(slot, self._offsets[name], part, self._dtype)
            # A copy: what is sent must not change after the mark was read.
            piece = view_at(view, shard_slice, part).clone(memory_format=torch.contiguous_format)
            pieces.append(piece.view(-1).view(torch.uint8).numpy().data)
        return [before, self._memory.mark(slot)], pieces

    def close(self) -> None:
        """Ends all threads and connections, and frees the memory."""
        self._server.close()
        self._memory.close()


class _Server:
    """The threads of a weight server: one that accepts connections, and one per connection."""

    def __init__(self, weight_server: WeightServer, listener: Listener):
        self._weight_server, self._listener = weight_server, listener
        self.address = listener.address
        self._lock, self._callers, self._closed = threading.Lock(), dict[threading.Thread, socket.socket](), False
        self._thread = threading.Thread(target=self._accept, name="weight server", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(Closed):
            while True:
                caller = self._listener.accept()
                thread = threading.Thread(target=self._serve_reader, args=(caller,), name="weight server", daemon=True)
                with self._lock:
                    self._callers[thread] = caller
                thread.start()

    def _serve_reader(self, caller: socket.socket) -> None:
        channel: Channel | None = None
        try:
            channel = self._listener.greet(caller)
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", READER_SECONDS, 0))
            while True:
                request, _ = channel.receive(READER_SECONDS)
                marks, pieces = self._weight_server.serve(request)
                channel.send(marks, *pieces)
        except (Closed, TimeoutError):
            pass  # the reader is done, gone, or does not know the key
        except Exception as error:  # an invalid request: its connection ends
            log.warning("a reader of the weights was rejected: %s", one_line(repr(error)))
        finally:
            caller.close()
            with self._lock:
                self._callers.pop(threading.current_thread(), None)

    def close(self) -> None:
        self._listener.close()
        self._thread.join()  # accepts no more connections
        with self._lock:
            callers = dict(self._callers)
        for thread, caller in callers.items():
            with contextlib.suppress(OSError):
                caller.shutdown(socket.SHUT_RDWR)
            thread.join()


def versions_to_keep(actors: ActorsConfig) -> int:
    """The newest version, one that may still be read, and those that generators load late with `on_update` "finish"."""
    return 2 + (actors.max_staleness if actors.on_update == "finish" else 0)


def _added(sums: list[dict[str, int]]) -> dict[str, int]:
    """Each tensor's sum over the ranks, wrapped to int64."""
    names = {name for rank_sums in sums for name in rank_sums}
    return {name: _wrapped(sum(rank_sums.get(name, 0) for rank_sums in sums)) for name in sorted(names)}


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Not a comparison of numbers, in which -0 equals 0 and NaN differs from itself."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _latest(since: list[dict[str, int]]) -> dict[str, int]:
    """Each tensor's highest sequence number over the ranks."""
    names = {name for of_rank in since for name in of_rank}
    return {name: max(of_rank.get(name, 0) for of_rank in since) for name in sorted(names)}


def _wrapped(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63
