"""`lockstep generator`: a process, or a tensor-parallel group, that samples for a run's trainer until told to end."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

from lockstep.config import CONFIG
from lockstep.errors import UserError
from lockstep.generate import Completion
from lockstep.generate.driver import DriverEngine, follow
from lockstep.generate.sampling_params import sampling_params_of
from lockstep.generate.sequence import Sequence
from lockstep.observe import Timeline, log
from lockstep.observe.actors import NAME
from lockstep.observe.heartbeat import Heartbeat
from lockstep.observe.heartbeat import host as place
from lockstep.parallel import World
from lockstep.rl.generators.channel import HANDSHAKE_SECONDS, Channel, Closed, call
from lockstep.rl.generators.spec import open_engine
from lockstep.rl.weights.reader import LoadResult
from lockstep.rl.weights.server import WeightManifest
from lockstep.version import __version__

REPORT_SECONDS = 0.05
"""Seconds between reports of new tokens; a finished sample is reported at once."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)
END_SECONDS = 1.5
"""A process that still runs this many seconds after the trainer is gone is stuck, and is killed."""


class _Ended(Exception):
    """The trainer, or a signal, ends this generator. why: the message for the trainer, if it does not know yet."""

    def __init__(self, why: str = ""):
        self.why = why


@dataclasses.dataclass
class _ActiveRequest:
    """A request in the engine."""

    id: int
    """The engine's."""
    sequences: list[Sequence]
    reported: list[int]
    """Tokens of each sample that have been reported."""
    ended: list[bool]
    """Whether each sample's end has been reported."""


def run_generator(address: str, key: bytes, name: str, world: World) -> int:
    """Samples for the trainer at `address` (HOST:PORT) until it says to end; returns the exit code.

    All ranks of a generator call it. key: the run's. name: the one that the trainer expects; empty: it assigns one.
    Raises UserError if the trainer cannot be reached, or needs something that this host cannot provide.
    """
    channels: list[Channel] = []
    welcome = world.from_main(lambda: _connect(address, key, name, world, channels))
    if not channels:
        return _follow(welcome, address, key, world)
    try:
        timeline = Timeline()
        with _heartbeat_file(welcome, timeline):
            return _GeneratorProcess(welcome, channels[0], key, world, timeline).run()
    except Closed as error:
        log.warning("the trainer at %s: %s; this generator exits", address, error)
        return 0
    finally:
        channels[0].close()


def _connect(address: str, key: bytes, name: str, world: World, channels: list[Channel]) -> dict[str, Any]:
    """The trainer's welcome message; appends the connection to `channels`."""
    host, _, port = address.rpartition(":")
    hello = {"name": name, "lockstep": __version__, "tensor": world.size, "pid": os.getpid(), "place": place()}
    try:
        channels.append(call(host, int(port), key))
        channels[0].send(hello | {"host": socket.gethostname()})
        welcome = channels[0].receive(HANDSHAKE_SECONDS)[0]
    except (Closed, TimeoutError, ValueError) as error:
        raise UserError(
            f"no run can be joined at {address!r}: {error}; give HOST:PORT as the run printed it, and the key "
            "file that it wrote"
        ) from error
    if "problem" in welcome:
        raise UserError(f"the trainer at {address} says: {welcome['problem']}")
    return dict(welcome)


def _heartbeat_file(welcome: dict[str, Any], timeline: Timeline) -> AbstractContextManager[Any]:
    """In the run's folder, if this host can write there; otherwise the trainer sees only the generator's messages."""
    run, name = Path(welcome.get("run", "")), welcome.get("name", "")
    reachable = (run / CONFIG).is_file() and os.access(run / "logs", os.W_OK)
    return Heartbeat(run, name, timeline) if reachable and NAME.fullmatch(name) else nullcontext()


class _GeneratorProcess:
    """The rank that talks to the trainer."""

    def __init__(self, welcome: dict[str, Any], channel: Channel, key: bytes, world: World, timeline: Timeline):
        self._channel, self._timeline = channel, timeline
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """Messages, and the exceptions that end it."""
        self._queue: deque[dict[str, Any]] = deque()
        """Requests and new weights that have been received but not handled yet."""
        self._finishes_first = welcome["on_update"] == "finish"
        self._exiting = threading.Event()
        self._requests: dict[int, _ActiveRequest] = {}
        """By the trainer's number."""
        self._last_report = 0.0
        self._statistics: dict[str, float] = {}
        """As last noted for reports; see `Remote.statistics`."""
        self._weights_seconds = 0.0
        for work in (self._receive, lambda: self._send_heartbeats(welcome["silence_seconds"] / 5)):
            threading.Thread(target=work, name="trainer", daemon=True).start()
        try:
            self._reader, self._engine = open_engine(welcome, key, world)
        except UserError as error:
            self._exiting.set()
            channel.send({"kind": "incompatible", "problem": str(error)})
            raise
        timeline.counters.append(lambda: self._engine.statistics.steps)

    def run(self) -> int:
        _on_signal(lambda: self._inbox.put(_Ended("it received a signal, and leaves")))
        try:
            while True:
                self._advance()
        except _Ended as ended:
            if ended.why:
                self._report()
                self._channel.send({"kind": "leaves", "why": ended.why})
        finally:
            if isinstance(self._engine, DriverEngine):
                self._engine.end()
            self._exiting.set()
        return 0

    def _advance(self) -> None:
        """Handles the messages that have arrived, then samples a token of each sequence."""
        self._take_messages(wait=not (self._engine.has_work or self._queue))
        while self._queue and not (self._queue[0]["kind"] == "weights" and self._finishes_before_weights()):
            message = self._queue.popleft()
            if message["kind"] == "request":
                self._begin(message)
            else:
                self._timeline.begin(message["manifest"]["version"] + 1)
                with self._timeline.span("weights"):
                    self._load_weights(message["manifest"])
            self._timeline.message = f"{message['kind']} from rank_0"
        if self._engine.has_work:
            if self._timeline.phase != "sample":
                self._timeline.enter("sample")
            ended = any(event.finish_reason for event in self._engine.step())
            if ended or time.monotonic() - self._last_report > REPORT_SECONDS:
                self._report()

    def _take_messages(self, wait: bool) -> None:
        """Puts received messages into the queue; aborts at once, as queued weights may wait for the samples.

        wait: for at least one. Raises _Ended and Closed.
        """
        if wait and self._timeline.phase != "idle":
            self._timeline.enter("idle", "requests of rank_0")
        while wait or not self._inbox.empty():
            message, wait = self._inbox.get(), False
            if isinstance(message, Exception):
                raise message
            if message["kind"] == "end":
                raise _Ended
            if message["kind"] == "abort":
                self._abort(message["id"])
            else:
                self._queue.append(message)

    def _begin(self, message: dict[str, Any]) -> None:
        params = sampling_params_of(message["params"])
        begun = [_completion(sample) for sample in message["begun"]]
        try:
            request = self._engine.add(message["prompt"], params, begun)
        except UserError as error:
            self._channel.send({"kind": "refused", "id": message["id"], "problem": str(error)})
            return
        sequences = list(self._engine.samples(request))
        for sequence in sequences:
            sequence.requested_at = message["received_at"]
        reported = [sequence.sampled for sequence in sequences]
        ended = [completion.finish_reason != "abort" for completion in begun]
        self._requests[message["id"]] = _ActiveRequest(request, sequences, reported, ended)
        if not any(sequence.finish_reason is None for sequence in sequences):
            self._report()  # no engine step will: a stop string was already complete, but not reported

    def _finishes_before_weights(self) -> bool:
        """Whether samples in flight are finished first: always, or if that is less work than continuing them.

        Continuing them with new weights recomputes the keys of all their tokens.
        """
        active = [s for request in self._requests.values() for s in request.sequences if s.finish_reason is None]
        if self._finishes_first:
            return bool(active)
        left = sum(sequence.params.max_tokens - sequence.sampled for sequence in active)
        return left < sum(len(sequence.tokens) for sequence in active)

    def _abort(self, request_id: int) -> None:
        if request := self._requests.pop(request_id, None):
            self._engine.abort(request.id)
        # It may be queued behind weights that wait.
        self._queue = deque(queued for queued in self._queue if queued.get("id") != request_id)

    def _load_weights(self, manifest: WeightManifest) -> None:
        # Tokens are reported with the weights version that they were sampled from.
        self._report()
        if not self._finishes_first:
            manifest = self._newest(manifest)
        while (result := self._read(manifest)).outcome == "late":
            # Newer weights are published and are, or will be, announced: later requests must be sampled from those.
            while (newer := self._newest(manifest)) is manifest:
                self._take_messages(wait=True)
            manifest = newer
        if result.outcome == "loaded":
            self._engine.weights_changed(manifest["version"])
            self._note_statistics()
            self._channel.send({"kind": "has_weights", "version": manifest["version"], "statistics": self._statistics})
        else:
            self._channel.send({"kind": "lost", "why": f"weights version {result.version}: {result.problem}"})

    def _newest(self, manifest: WeightManifest) -> WeightManifest:
        """The last manifest in the queue, from which all are removed; `manifest` if there is none."""
        announced = [message for message in self._queue if message["kind"] == "weights"]
        for message in announced:
            self._queue.remove(message)
        return announced[-1]["manifest"] if announced else manifest

    def _read(self, manifest: WeightManifest) -> LoadResult:
        began = time.monotonic()
        drives = isinstance(self._engine, DriverEngine)
        with self._engine.on_all_ranks("load", manifest) if drives else nullcontext():  # type: ignore[attr-defined]
            result = self._reader.load(manifest)
        self._weights_seconds += time.monotonic() - began
        return result

    def _report(self) -> None:
        """Sends the tokens sampled since the last report."""
        self._last_report = time.monotonic()
        version, samples = self._engine.weights_version, []
        for request_id, request in list(self._requests.items()):
            for index, sequence in enumerate(request.sequences):
                before, now = request.reported[index], sequence.sampled
                if request.ended[index] or (now == before and sequence.finish_reason is None):
                    continue
                request.reported[index], request.ended[index] = now, sequence.finish_reason is not None
                new = {
                    "token_ids": sequence.tokens[sequence.prompt_length + before :],
                    "logprobs": sequence.logprobs[before:],
                    "truncated_logprobs": sequence.truncated_logprobs[before:],
                    "versions": [version] * (now - before),
                    "routes": routes if any(routes := sequence.routes[before:]) else [],
                    "finish_reason": sequence.finish_reason,
                }
                samples.append([request_id, index, new])
            if all(request.ended):
                del self._requests[request_id]
        self._note_statistics()
        if samples:
            self._channel.send({"kind": "tokens", "samples": samples, "statistics": self._statistics})

    def _note_statistics(self) -> None:
        self._statistics = dataclasses.asdict(self._engine.statistics) | {"weights_seconds": self._weights_seconds}

    def _receive(self) -> None:
        try:
            while True:
                message = self._channel.receive()[0]
                # A request's queue time starts here, before it waits behind weights.
                self._inbox.put(message | {"received_at": time.perf_counter()})
        except Closed as error:
            self._inbox.put(error)
            _kill_unless(self._exiting)

    def _send_heartbeats(self, seconds: float) -> None:
        try:
            while not self._exiting.wait(seconds):
                self._channel.send({"kind": "alive", "statistics": self._statistics})
        except Closed:
            pass  # the receiving thread reports it


def _follow(welcome: dict[str, Any], address: str, key: bytes, world: World) -> int:
    exiting = threading.Event()
    heartbeats = (welcome, address, key, world, exiting)
    threading.Thread(target=_send_rank_heartbeats, args=heartbeats, name="trainer", daemon=True).start()
    try:
        reader, engine = open_engine(welcome, key, world)
        # torchrun forwards signals to all ranks; the first one ends the others.
        _on_signal(lambda: None)
        follow(engine, {"load": reader.load})
    finally:
        exiting.set()
    return 0


def _send_rank_heartbeats(
    welcome: dict[str, Any], address: str, key: bytes, world: World, exiting: threading.Event
) -> None:
    """Shows the trainer that this rank is alive: all other messages come from the first rank."""
    host, _, port = address.rpartition(":")
    try:
        channel = call(host, int(port), key)
        hello = {"generator": welcome["name"], "lockstep": __version__, "rank": world.rank, "pid": os.getpid()}
        channel.send(hello | {"host": socket.gethostname(), "place": place()})
        while not exiting.is_set():
            channel.send({"kind": "alive"})
            with contextlib.suppress(TimeoutError):
                channel.receive(welcome["silence_seconds"] / 5)
        channel.close()
    except Closed:
        _kill_unless(exiting)


def _kill_unless(exiting: threading.Event) -> None:
    """Kills this process, even if its main thread is blocked, unless `exiting` is set within `END_SECONDS`."""
    if not exiting.wait(END_SECONDS):
        os._exit(1)


def _on_signal(leave: Callable[[], None]) -> None:
    """From here on the first SIGTERM or SIGINT calls `leave`, and the second kills the process."""

    def handle(number: int, frame: FrameType | None) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        leave()

    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, handle)


def _completion(plain: dict[str, Any]) -> Completion:
    plain = dict(plain)
    plain["finish_reason"] = plain["finish_reason"] or "abort"
    return Completion(**plain)
