"""A generator that has called: what it is asked goes through its connection, and what it says is told on."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Mapping
from typing import Any

from lockstep.observe.sign_of_life import runs_here
from lockstep.rl.actors.remote import RemoteSample, Reports, Request
from lockstep.rl.actors.shelf import Edition
from lockstep.rl.actors.wire import Channel, Closed

BUSY = 20
"""Times as long may be silent what the kernel of this host says still runs: on a busy machine nobody gets to speak."""


class Hearing:
    """Who says nothing for `seconds` is taken for dead, unless it runs on this host: then for `BUSY` times as long."""

    def __init__(self, channel: Channel, seconds: float, hello: Mapping[str, Any]):
        """hello: says which process it is, as `pid` and `place`."""
        self.seconds = seconds
        self._channel, self._pid, self._place = channel, hello["pid"], hello["place"]

    def next(self) -> Any:
        """The next message. Raises TimeoutError, and Closed."""
        for _ in range(BUSY):
            try:
                return self._channel.receive(self.seconds)[0]
            except TimeoutError:
                if not runs_here(self._pid, self._place):
                    break
        raise TimeoutError


class WireRemote:
    """A `Remote`. Two threads, one for each direction, so that nobody waits for a generator that does not read."""

    def __init__(self, name: str, channel: Channel, room: int, hearing: Hearing):
        self.name, self.room, self._hearing = name, room, hearing
        self.did: dict[str, float] = {}
        self._channel = channel
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, reports: Reports) -> None:
        """From here on it tells what comes, until it is lost or closed."""
        for work in (self._write, lambda: self._read(reports)):
            self._threads.append(threading.Thread(target=work, name=self.name, daemon=True))
            self._threads[-1].start()

    def ask(self, request: Request) -> None:
        begun = [dataclasses.asdict(sample) for sample in request.samples]
        params = dataclasses.asdict(request.params)
        self._outbox.put({"kind": "ask", "id": request.id, "prompt": request.prompt, "params": params, "begun": begun})

    def abort(self, request_id: int) -> None:
        self._outbox.put({"kind": "abort", "id": request_id})

    def new_weights(self, edition: Edition) -> None:
        self._outbox.put({"kind": "weights", "edition": edition})

    def close(self) -> None:
        self._closing.set()
        self._outbox.put({"kind": "end"})
        self._outbox.put(None)
        self._threads[0].join(self._hearing.seconds)
        self._channel.close()
        for thread in self._threads:
            thread.join()

    def _write(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                self._channel.send(message)
        except Closed:
            self._channel.close()  # whoever reads hears of it

    def _read(self, reports: Reports) -> None:
        try:
            while True:
                self._tell(self._hearing.next(), reports)
        except TimeoutError:
            why = f"it has said nothing for {self._hearing.seconds:g} s (actors.silence_seconds)"
        except Closed as error:
            why = str(error)
        except (KeyError, TypeError, ValueError) as error:
            why = f"it says what is no message ({error!r})"
        if not self._closing.is_set():
            self._channel.close()
            self._outbox.put(None)
            reports.lost(self, why)

    def _tell(self, message: dict[str, Any], reports: Reports) -> None:
        kind = message["kind"]
        self.did = message.get("did", self.did)
        if kind == "tokens":
            reports.sampled(self, [(i, index, RemoteSample(**new)) for i, index, new in message["samples"]])
        elif kind == "has_weights":
            reports.has_weights(self, message["version"])
        elif kind == "refused":
            reports.refused(self, message["id"], message["problem"])
        elif kind == "unfit":
            reports.unfit(self, message["problem"])
        elif kind in ("lost", "leaves"):
            raise Closed(message["why"])
        elif kind != "alive":
            raise ValueError(f"kind {kind!r}")
