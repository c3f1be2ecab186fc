"""A generator process on the other end of a channel: sends it requests, and passes its reports on."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Mapping
from typing import Any

from lockstep.errors import one_line
from lockstep.observe.heartbeat import runs_here
from lockstep.rl.generators.channel import Channel, Closed
from lockstep.rl.generators.remote import InvalidResponse, RemoteSample, Reports, Request
from lockstep.rl.weights.server import WeightManifest

BUSY_FACTOR = 20
"""Silence is allowed this many times longer for a process that still runs on this host: a busy machine delays it."""


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
    """A `Remote`. One thread per direction, so that nothing waits for a generator that does not read."""

    def __init__(self, name: str, capacity: int, monitored: MonitoredChannel):
        self.name, self.capacity = name, capacity
        self.statistics: dict[str, float] = {}
        self._monitored, self._channel = monitored, monitored.channel
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, reports: Reports) -> None:
        """Starts to pass on its reports, until it is lost or closed."""
        for work in (self._write, lambda: self._read(reports)):
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

    def _read(self, reports: Reports) -> None:
        invalid = False
        try:
            while True:
                self._handle(self._monitored.next(), reports)
        except Closed as error:
            why = str(error)
        except Exception as error:  # after any error, no more samples arrive
            why, invalid = str(error) if isinstance(error, InvalidResponse) else f"not a message: {error!r}", True
        if not self._closing.is_set():
            self._channel.close()
            self._outbox.put(None)
            reports.lost(self, why, invalid)

    def _handle(self, message: dict[str, Any], reports: Reports) -> None:
        kind = message["kind"]
        self.statistics = message.get("statistics", self.statistics)
        if kind == "tokens":
            reports.sampled(self, [(i, index, RemoteSample(**new)) for i, index, new in message["samples"]])
        elif kind == "has_weights":
            reports.has_weights(self, message["version"])
        elif kind == "refused":
            reports.refused(self, message["id"], message["problem"])
        elif kind == "incompatible":
            reports.incompatible(self, message["problem"])
        elif kind in ("lost", "leaves"):
            raise Closed(one_line(message["why"]))
