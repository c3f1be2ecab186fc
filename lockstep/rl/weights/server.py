"""The trainer's weights for generators in separate processes, which read them whenever they are ready.

Each training rank copies its shards, cast to the generators' dtype, and serves them by TCP. Generators can join, leave
or be killed at any time: the trainer waits for none, and none takes part in its collectives. A published copy is never
written again, so a reader gets the whole version even if newer ones are published meanwhile.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.config import ActorsConfig
from lockstep.errors import one_line
from lockstep.model.shard import local_values
from lockstep.observe import log
from lockstep.parallel import World
from lockstep.rl.generators.channel import Closed, Listener
from lockstep.rl.weights.checksum import checksum
from lockstep.rl.weights.shard_slices import (
    intersection,
    owners_of,
    read_slice,
    read_slices,
    shard_slice_of,
    view_at,
)

READER_SECONDS = 60
"""Timeout for a reader's next request, and for it to receive the response."""
WeightManifest = dict[str, Any]
"""Where to read one version of the weights; JSON-able.

`version`; `sequence`: number of the publication; `sums`: each tensor's checksum; `since`: the publication since which
each tensor's bits have not changed; `id` of the server; `ranks`: for each training rank the `address` that it listens
on and its `parts`: [name, shard slice].
"""


class WeightServer:
    """Publishes a run's weights to readers in other processes (`WeightReader`).

    All ranks of `world` create it, and call its methods, together. tensors: this rank's, by the model's names. dtype:
    the generators'. key: readers must know it. host: this host's address for them. versions: how many can be read at a
    time. Raises UserError if it cannot listen there.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        world: World,
        key: bytes,
        host: str = "127.0.0.1",
        versions: int = 2,
    ):
        self._tensors, self._dtype, self._world, self._versions = tensors, dtype, world, versions
        local = {name: shard_slice_of(tensor) for name, tensor in tensors.items()}
        owners = owners_of([read_slices(parts) for parts in world.gather(local)])
        # Of replicated shards, the first rank's is published.
        self._shards = {name: part for name, part in local.items() if owners[name][part][0] == world.rank}
        self._sequence = 0
        self._published: dict[int, dict[str, Tensor]] = {}
        """This rank's copies of its shards, by sequence number."""
        self._sums, self._since = dict[str, int](), dict[str, int]()
        """Of the newest copies, as in the manifest."""
        self._listener = Listener(key, host)
        self._lock, self._readers = threading.Lock(), dict[threading.Thread, socket.socket]()
        self._thread = threading.Thread(target=self._accept, name="weight server", daemon=True)
        self._thread.start()
        self._id = world.from_main(lambda: secrets.token_hex(8))
        own = {"address": list(self._listener.address), "parts": list(self._shards.items())}
        self._ranks = world.gather(own)
        self._names = sorted(owners)

    @torch.no_grad()
    def publish(self, version: int) -> WeightManifest:
        """Copies the current weights; returns the manifest, on every rank. Frees the oldest version first."""
        before = self._published.get(self._sequence, {})
        self._sequence += 1
        self._published.pop(self._sequence - self._versions, None)
        self._published[self._sequence] = {name: self._copy(name, before.get(name)) for name in self._shards}
        per_rank = self._world.gather([self._sums, self._since])
        return {
            "version": version,
            "sequence": self._sequence,
            "sums": {name: _wrapped(sum(sums.get(name, 0) for sums, _ in per_rank)) for name in self._names},
            "since": {name: max(since.get(name, 0) for _, since in per_rank) for name in self._names},
            "id": self._id,
            "ranks": self._ranks,
        }

    def _copy(self, name: str, before: Tensor | None) -> Tensor:
        """A copy of a shard; that of the version `before` if it is the same, as a frozen tensor's is."""
        tensor = self._tensors[name]
        values = local_values(tensor.detach()).to("cpu", self._dtype, copy=True).contiguous()
        # Not as numbers, of which -0 equals 0 and NaN differs from itself.
        if before is not None and torch.equal(values.view(torch.uint8), before.view(torch.uint8)):
            return before
        self._since[name], self._sums[name] = self._sequence, int(checksum(values, self._shards[name], tensor.shape))
        return values

    def _pieces(self, request: Any) -> Iterator[Tensor] | None:
        """The pieces that a reader requests; None if their version has been freed.

        Raises LookupError, TypeError or ValueError for an invalid request.
        """
        published = self._published.get(request["sequence"])
        if published is None:
            return None
        requested = [(name, read_slice(shard_slice)) for name, shard_slice in request["pieces"]]
        for name, shard_slice in requested:
            part = self._shards[name]
            if len(shard_slice) != len(part) or intersection(shard_slice, part) != shard_slice:
                raise ValueError("not a piece of a part")
        return (view_at(published[name], shard_slice, self._shards[name]) for name, shard_slice in requested)

    def _accept(self) -> None:
        with contextlib.suppress(Closed):
            while True:
                caller = self._listener.accept()
                thread = threading.Thread(target=self._serve, args=(caller,), name="weight server", daemon=True)
                with self._lock:
                    self._readers[thread] = caller
                thread.start()

    def _serve(self, caller: socket.socket) -> None:
        """Sends one message per requested piece or, if their version has been freed, one that is "late"."""
        try:
            channel = self._listener.greet(caller)
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", READER_SECONDS, 0))
            while True:
                pieces = self._pieces(channel.receive(READER_SECONDS)[0])
                for piece in () if pieces is None else pieces:
                    channel.send("piece", piece.contiguous().view(-1).view(torch.uint8).numpy().data)
                if pieces is None:
                    channel.send("late")
        except (Closed, TimeoutError):
            pass  # the reader is done, gone, or does not know the key
        except Exception as error:  # an invalid request: its connection ends
            log.warning("a reader of the weights was rejected: %s", one_line(repr(error)))
        finally:
            caller.close()
            with self._lock:
                self._readers.pop(threading.current_thread(), None)

    def close(self) -> None:
        """Ends all threads and connections, and frees the memory."""
        self._listener.close()
        self._thread.join()  # accepts no more connections
        with self._lock:
            readers = dict(self._readers)
        for thread, caller in readers.items():
            with contextlib.suppress(OSError):
                caller.shutdown(socket.SHUT_RDWR)
            thread.join()
        self._published = {}


def versions_to_keep(actors: ActorsConfig) -> int:
    """The newest version, one that may still be read, and those that generators load late with `on_update` "finish"."""
    return 2 + (actors.max_staleness if actors.on_update == "finish" else 0)


def _wrapped(number: int) -> int:
    """As an int64."""
    return (number + 2**63) % 2**64 - 2**63
