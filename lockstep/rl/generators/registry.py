"""Generator processes that connect to the run: how they join its pool, and what is sent and received then."""

from __future__ import annotations

import dataclasses
import queue
import re
import socket
import threading
from collections.abc import Mapping
from typing import Any

from lockstep.errors import one_line
from lockstep.observe import announce, log
from lockstep.observe.heartbeat import runs_here
from lockstep.rl.generators.channel import HANDSHAKE_SECONDS, Channel, Closed, Listener
from lockstep.rl.generators.pool import GeneratorPool
from lockstep.rl.generators.remote import InvalidResponse, RemoteSample, Request
from lockstep.rl.weights.server import WeightManifest
from lockstep.version import __version__

BUSY_FACTOR = 20
"""Silence is allowed this many times longer for a process that still runs on this host: a busy machine delays it."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]{0,63}")
"""Of a generator; used in metrics, logs and file names."""


class MonitoredChannel:
    """A channel whose peer counts as dead after `seconds` of silence, or `BUSY_FACTOR` times that on this host."""

    def __init__(self, channel: Channel, seconds: float, hello: Mapping[str, Any]):
        """hello: identifies the peer's process, by `pid` and `place`."""
        self.channel, self.seconds = channel, seconds
        self._pid, self._place = hello["pid"], hello["place"]

    def next(self) -> Any:
        """The next message. Raises Closed, also if the peer counts as dead."""
        extensions = iter(range(BUSY_FACTOR - 1))
        try:
            return self.channel.receive(
                self.seconds, lambda: next(extensions, None) is not None and runs_here(self._pid, self._place)
            )[0]
        except TimeoutError:
            raise Closed(f"it has sent nothing for {self.seconds:g} s (actors.silence_seconds)") from None


class ChannelRemote:
    """A `Remote`: a generator process. One thread per direction, so that nothing waits for one that does not read."""

    def __init__(self, name: str, capacity: int, monitored: MonitoredChannel):
        self.name, self.capacity = name, capacity
        self.statistics: dict[str, float] = {}
        self._monitored, self._channel = monitored, monitored.channel
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, pool: GeneratorPool) -> None:
        """Starts to pass on its reports, until it is lost or closed."""
        for work in (self._write, lambda: self._read(pool)):
            self._threads.append(threading.Thread(target=work, name=self.name, daemon=True))
            self._threads[-1].start()

    def submit(self, request: Request) -> None:
        begun = [dataclasses.asdict(sample) for sample in request.samples]
        params = dataclasses.asdict(request.params)
        self._outbox.put(
            {"kind": "request", "id": request.id, "prompt": request.prompt, "params": params, "begun": begun}
        )

    def abort(self, request_id: int) -> None:
        self._outbox.put({"kind": "abort", "id": request_id})

    def load_weights(self, manifest: WeightManifest) -> None:
        self._outbox.put({"kind": "weights", "manifest": manifest})

    def close(self) -> None:
        self._closing.set()
        self._outbox.put({"kind": "end"})
        self._outbox.put(None)
        self._threads[0].join(self._monitored.seconds)
        self._channel.close()
        for thread in self._threads:
            thread.join()

    def _write(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                self._channel.send(message)
        except Closed:
            self._channel.close()  # the reading thread notices

    def _read(self, pool: GeneratorPool) -> None:
        invalid = False
        try:
            while True:
                self._handle(self._monitored.next(), pool)
        except Closed as error:
            why = str(error)
        except Exception as error:  # after any error, no more samples arrive
            why, invalid = str(error) if isinstance(error, InvalidResponse) else f"not a message: {error!r}", True
        if not self._closing.is_set():
            self._channel.close()
            self._outbox.put(None)
            pool.lost(self, why, invalid)

    def _handle(self, message: dict[str, Any], pool: GeneratorPool) -> None:
        kind = message["kind"]
        self.statistics = message.get("statistics", self.statistics)
        if kind == "tokens":
            pool.sampled(self, [(i, index, RemoteSample(**new)) for i, index, new in message["samples"]])
        elif kind == "has_weights":
            pool.has_weights(self, message["version"])
        elif kind == "refused":
            pool.refused(self, message["id"], message["problem"])
        elif kind == "incompatible":
            pool.incompatible(self, message["problem"])
        elif kind in ("lost", "leaves"):
            raise Closed(one_line(message["why"]))


class GeneratorRegistry:
    """Listens, in a thread, for generators that know the run's key. A context manager."""

    def __init__(self, pool: GeneratorPool, listener: Listener, welcome: Mapping[str, Any], capacity: int):
        """welcome: describes the run to a generator. capacity: samples that each decodes at a time."""
        self._pool, self._listener, self._welcome, self._capacity = pool, listener, welcome, capacity
        self._greeting = threading.Lock()
        self._rank_channels: set[Channel] = set()
        """Connections of all ranks but the first of each generator."""
        self._closed = False
        self._thread = threading.Thread(target=self._listen, name="generator registry", daemon=True)

    def __enter__(self) -> GeneratorRegistry:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._thread.join()
        with self._greeting:
            self._closed = True
        for name in self._pool.names:
            if remote := self._pool.leave(name):
                remote.close()
        for channel in list(self._rank_channels):
            channel.close()

    def _listen(self) -> None:
        while True:
            try:
                caller = self._listener.accept()
            except Closed:
                return
            # One thread per connection, so that a silent one does not delay the others.
            threading.Thread(target=self._greet, args=(caller,), name="greeting", daemon=True).start()

    def _greet(self, caller: socket.socket) -> None:
        channel: Channel | None = None
        try:
            channel = self._listener.greet(caller)
            hello, _ = channel.receive(HANDSHAKE_SECONDS)
            if problem := self._problem(hello):
                channel.send({"problem": problem})
                raise Closed(f"a generator on {hello['host']}: {problem}")
            if "generator" in hello:
                self._monitor_rank(channel, hello)
            else:
                self._admit(channel, hello)
        except Exception as error:
            # Always closes the connection, as the caller waits for a response.
            if channel is not None:
                channel.close()
            log.warning("a connection was rejected: %s", one_line(error))

    def _problem(self, hello: Mapping[str, Any]) -> str:
        """Why a generator cannot join; empty if it can."""
        name = hello.get("name", "")
        if hello["lockstep"] != __version__:
            return f"it runs lockstep {__version__}, you {hello['lockstep']}; install the same version on both sides"
        if name and not NAME.fullmatch(name):
            return f"the name {name!r} is used in metrics and files; give one of letters, digits and _ . : @ -"
        if name in self._pool.banned:
            return f"{name} sent invalid data and gets no more requests in this run"
        return ""

    def _admit(self, channel: Channel, hello: Mapping[str, Any]) -> None:
        with self._greeting:
            if self._closed:
                channel.close()
                return
            name = hello["name"] or self._free_name()
            # A generator that connects again under its name has been restarted.
            if previous := self._pool.leave(name):
                previous.close()
            monitored = MonitoredChannel(channel, self._welcome["silence_seconds"], hello)
            remote = ChannelRemote(name, self._capacity, monitored)
            channel.send({**self._welcome, "name": name})
            # Before it starts, so that one that is lost at once is removed.
            self._pool.join(remote)
            remote.start(self._pool)
        ranks = f", {hello['tensor']} ranks" if hello["tensor"] > 1 else ""
        announce(f"rl: {name} joins, process {hello['pid']} on {hello['host']}{ranks}")

    def _monitor_rank(self, channel: Channel, hello: Mapping[str, Any]) -> None:
        """Receives the heartbeats of another rank of a generator, which is lost if they stop."""
        name, why = hello["generator"], ""
        with self._greeting:
            remote = None if self._closed else self._pool.remote(name)
            self._rank_channels.add(channel)
        monitored = MonitoredChannel(channel, self._welcome["silence_seconds"], hello)
        try:
            while remote is not None and self._pool.remote(name) is remote:
                monitored.next()
        except Closed as error:
            why = str(error)
        finally:
            channel.close()
            self._rank_channels.discard(channel)
        if why and remote is not None and self._pool.remote(name) is remote:
            self._pool.lost(remote, f"its rank {hello['rank']}: {why}")
            remote.close()

    def _free_name(self) -> str:
        taken = {*self._pool.names, *self._pool.required, *self._pool.banned}
        return next(name for number in range(len(taken) + 1) if (name := f"generator_{number}") not in taken)
