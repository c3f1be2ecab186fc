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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from lockstep.config import CONFIG, CompileConfig, EngineConfig, ParallelConfig
from lockstep.data import load_tokenizer
from lockstep.errors import UserError
from lockstep.generate import Completion, Engine
from lockstep.generate.drafts import HistoryDraft, make_draft
from lockstep.generate.lead import LeadingEngine, follow
from lockstep.generate.sampling_params import sampling_params_of
from lockstep.generate.sequence import Sequence
from lockstep.hub import local_folder
from lockstep.model import Lora, arithmetic_of, initialize, read_config, resolve_dtype, set_arithmetic
from lockstep.model.known_operators import refuse_unknown_operators
from lockstep.observe import Timeline, announce, log, start_line
from lockstep.observe.actors import NAME
from lockstep.observe.sign_of_life import SignOfLife
from lockstep.observe.sign_of_life import host as place
from lockstep.parallel import World, apply_compile, generator_model
from lockstep.rl.generators.channel import HANDSHAKE_SECONDS, Channel, Closed, call
from lockstep.rl.rollouts.plain import plain_shape
from lockstep.rl.rollouts.recorded import recall
from lockstep.rl.weights.reader import Taken, WeightReader
from lockstep.rl.weights.server import WeightManifest
from lockstep.version import __version__

TELL_SECONDS = 0.05
"""Seconds between reports of sampled tokens; a finished sample is reported at once."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)
END_SECONDS = 1.5
"""A process still running this many seconds after the trainer is gone is stuck, and is killed."""


class _Leaves(Closed):
    """A signal has asked this generator to end."""


@dataclasses.dataclass
class _Held:
    """A request of the trainer's in the engine, and how many tokens of each sample have been reported."""

    request: int
    sequences: list[Sequence]
    told: list[int]
    ended: list[bool]


def run_generator(address: str, key: bytes, name: str, world: World) -> int:
    """Samples for the trainer at `address` (HOST:PORT), which knows `key`, until it says to end; returns the exit code.

    All ranks of a generator call it. name: the one under which the trainer expects it; empty: the trainer assigns one.
    Raises UserError if the trainer cannot be reached, or needs something that this host cannot provide.
    """
    channels: list[Channel] = []
    welcome = world.from_main(lambda: _greet(address, key, name, world, channels))
    if not channels:
        return _follow(welcome, address, key, world)
    try:
        timeline = Timeline()
        with _sign_of_life(welcome, timeline):
            return _Generator(welcome, channels[0], key, world, timeline).run()
    except Closed as error:
        log.warning("the trainer at %s: %s; this generator exits", address, error)
        return 0
    finally:
        channels[0].close()


def _greet(address: str, key: bytes, name: str, world: World, channels: list[Channel]) -> dict[str, Any]:
    """What the trainer says about its run; the connection is appended to `channels`."""
    host, _, port = address.rpartition(":")
    hello = {"name": name, "lockstep": __version__, "tensor": world.size, "pid": os.getpid(), "place": place()}
    try:
        channels.append(call(host, int(port), key))
        channels[0].send(hello | {"host": socket.gethostname()})
        welcome = channels[0].receive(HANDSHAKE_SECONDS)[0]
    except (Closed, TimeoutError, ValueError) as error:
        raise UserError(
            f"no trainer can be reached at {address!r}: {error}; give HOST:PORT as the run printed it, and the key "
            "file that it wrote"
        ) from error
    if "problem" in welcome:
        raise UserError(f"the trainer at {address} says: {welcome['problem']}")
    return dict(welcome)


def _sign_of_life(welcome: dict[str, Any], timeline: Timeline) -> AbstractContextManager[Any]:
    """In the run's folder, if this host can write there; otherwise the trainer sees only the generator's messages."""
    run, name = Path(welcome.get("run", "")), welcome.get("name", "")
    reachable = (run / CONFIG).is_file() and os.access(run / "logs", os.W_OK)
    return SignOfLife(run, name, timeline) if reachable and NAME.fullmatch(name) else nullcontext()


class _Generator:
    """The rank that talks to the trainer."""

    def __init__(self, welcome: dict[str, Any], channel: Channel, key: bytes, world: World, timeline: Timeline):
        self._channel, self._world, self._timeline = channel, world, timeline
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._queue: deque[dict[str, Any]] = deque()
        """Messages received but not handled yet."""
        self._finishes_first = welcome["on_update"] == "finish"
        self._ended, self._over = threading.Event(), threading.Event()
        self._held: dict[int, _Held] = {}
        self._told = 0.0
        self._did: dict[str, float] = {}
        """Its statistics as reported; see `Remote.did`."""
        self._weights_seconds = 0.0
        for work in (self._receive, lambda: self._say_alive(welcome["silence_seconds"] / 5)):
            threading.Thread(target=work, name="trainer", daemon=True).start()
        try:
            self._reader, self._engine = _open(welcome, key, world)
        except UserError as error:
            self._over.set()
            channel.send({"kind": "unfit", "problem": str(error)})
            raise
        timeline.counters.append(lambda: self._engine.statistics.steps)

    def run(self) -> int:
        _take_signals(lambda: self._inbox.put(_Leaves("a signal")))
        try:
            self._serve()
        except _Leaves:
            self._tell()
            self._channel.send({"kind": "leaves", "why": "it received a signal, and leaves"})
        finally:
            self._ended.set()
            if isinstance(self._engine, LeadingEngine):
                self._engine.end()
            self._reader.close()
            self._over.set()
        return 0

    def _serve(self) -> None:
        while True:
            self._receive_all()
            while self._queue and not (self._queue[0]["kind"] == "weights" and self._finishes_before_weights()):
                message = self._queue.popleft()
                kind = message["kind"]
                if kind == "end":
                    return
                if kind == "ask":
                    self._ask(message)
                elif kind == "abort":
                    self._abort(message["id"])
                elif kind == "weights":
                    self._timeline.begin(message["manifest"]["version"] + 1)
                    with self._timeline.span("weights"):
                        self._take(message["manifest"])
                self._timeline.message = f"{kind} from rank_0"
            if self._engine.has_work:
                if self._timeline.phase != "sample":
                    self._timeline.enter("sample")
                ended = any(event.finish_reason for event in self._engine.step())
                if ended or time.monotonic() - self._told > TELL_SECONDS:
                    self._tell()

    def _receive_all(self, wait: bool = False) -> None:
        """Puts received messages into the queue; waits for one if there is nothing to do. Raises Closed."""
        wait = wait or not (self._engine.has_work or self._queue)
        if wait and self._timeline.phase != "idle":
            self._timeline.enter("idle", "requests of rank_0")
        while wait or not self._inbox.empty():
            message, wait = self._inbox.get(), False
            if isinstance(message, Closed):
                if any(each["kind"] == "end" for each in self._queue):
                    return  # the trainer has said so and is gone
                raise message
            if message["kind"] in ("end", "abort"):
                # Not behind weights that wait for the very samples to be ended.
                self._queue.appendleft(message)
            else:
                self._queue.append(message)

    def _ask(self, message: dict[str, Any]) -> None:
        params = sampling_params_of(message["params"])
        begun = [_completion(sample) for sample in message["begun"]]
        try:
            request = self._engine.add(message["prompt"], params, begun)
        except UserError as error:
            self._channel.send({"kind": "refused", "id": message["id"], "problem": str(error)})
            return
        sequences = list(self._engine.samples(request))
        for sequence in sequences:
            sequence.asked_at = message["came_at"]
        told = [sequence.sampled for sequence in sequences]
        ended = [completion.finish_reason != "abort" for completion in begun]
        self._held[message["id"]] = _Held(request, sequences, told, ended)
        if not any(sequence.finish_reason is None for sequence in sequences):
            self._tell()  # no engine step will: a stop string was already complete, but not reported

    def _finishes_before_weights(self) -> bool:
        """Whether samples in flight are finished first: always, or if that is less work than continuing them.

        With new weights the keys of all tokens so far are recomputed.
        """
        begun = [s for held in self._held.values() for s in held.sequences if s.finish_reason is None]
        if self._finishes_first:
            return bool(begun)
        left = sum(sequence.params.max_tokens - sequence.sampled for sequence in begun)
        return left < sum(len(sequence.tokens) for sequence in begun)

    def _abort(self, request: int) -> None:
        if held := self._held.pop(request, None):
            self._engine.abort(held.request)
        # It may be queued behind weights that wait.
        self._queue = deque(each for each in self._queue if each["kind"] != "ask" or each["id"] != request)

    def _take(self, manifest: WeightManifest) -> None:
        # Tokens are reported with the weights version that they were sampled from.
        self._tell()
        if not self._finishes_first:
            manifest = self._newest(manifest)
        while (taken := self._read(manifest)).outcome == "late":
            # Newer weights are laid out and are, or will be, announced: later requests must be sampled from those.
            while (newer := self._newest(manifest)) is manifest:
                self._receive_all(wait=True)
            manifest = newer
        if taken.outcome == "taken":
            self._engine.weights_changed(manifest["version"])
            self._note_work()
            self._channel.send({"kind": "has_weights", "version": manifest["version"], "did": self._did})
        else:
            self._channel.send({"kind": "lost", "why": f"weights version {taken.version}: {taken.said}"})

    def _newest(self, manifest: WeightManifest) -> WeightManifest:
        """The last edition announced in the queue, from which all are removed; `manifest` if there is none."""
        announced = [message for message in self._queue if message["kind"] == "weights"]
        for message in announced:
            self._queue.remove(message)
        return announced[-1]["manifest"] if announced else manifest

    def _read(self, manifest: WeightManifest) -> Taken:
        leads = isinstance(self._engine, LeadingEngine)
        with (
            self._taking_weights(),
            self._engine.on_all_ranks("take", manifest) if leads else nullcontext(),  # type: ignore[attr-defined]
        ):
            return self._reader.take(manifest)

    @contextmanager
    def _taking_weights(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._weights_seconds += time.monotonic() - began

    def _tell(self) -> None:
        """Reports what has been sampled since the last call."""
        self._told = time.monotonic()
        version, samples = self._engine.weights_version, []
        for request_id, held in list(self._held.items()):
            for index, sequence in enumerate(held.sequences):
                told, now = held.told[index], sequence.sampled
                if held.ended[index] or (now == told and sequence.finish_reason is None):
                    continue
                held.told[index], held.ended[index] = now, sequence.finish_reason is not None
                new = {
                    "token_ids": sequence.tokens[sequence.prompt_length + told :],
                    "logprobs": sequence.logprobs[told:],
                    "cut_logprobs": sequence.cut_logprobs[told:],
                    "versions": [version] * (now - told),
                    "routes": routes if any(routes := sequence.routes[told:]) else [],
                    "finish_reason": sequence.finish_reason,
                }
                samples.append([request_id, index, new])
            if all(held.ended):
                del self._held[request_id]
        self._note_work()
        if samples:
            self._channel.send({"kind": "tokens", "samples": samples, "did": self._did})

    def _note_work(self) -> None:
        self._did = dataclasses.asdict(self._engine.statistics) | {"weights_seconds": self._weights_seconds}

    def _receive(self) -> None:
        try:
            while True:
                message = self._channel.receive()[0]
                # The time spent waiting behind weights counts from here.
                self._inbox.put(message | {"came_at": time.perf_counter()})
        except Closed as error:
            self._inbox.put(error)
            _end_unless(self._over)

    def _say_alive(self, seconds: float) -> None:
        try:
            while not self._ended.wait(seconds):
                self._channel.send({"kind": "alive", "did": self._did})
        except Closed:
            pass  # the receiving thread reports it


def _open(welcome: dict[str, Any], key: bytes, world: World) -> tuple[WeightReader, Engine]:
    """The model as the trainer describes it, with its weights still to be read, and an engine over it."""
    folder, device = local_folder(welcome["model"]), world.device
    expected = welcome["shape"]
    ends = tuple(expected["eos_token_ids"])
    shape = dataclasses.replace(read_config(folder), reduction_chunks=welcome["reduction_chunks"], eos_token_ids=ends)
    if shape.lora is None and (lora := expected.get("lora")):  # a new adapter that the run trains
        shape = dataclasses.replace(shape, lora=Lora(lora["rank"], lora["alpha"], tuple(lora["modules"])))
    own = plain_shape(shape)
    if other := [f"{name} {own[name]} and not {expected.get(name)}" for name in own if own[name] != expected.get(name)]:
        said = ", ".join(other[:3])
        raise UserError(f"{folder}: differs from the trainer's model: {said}; copy the trainer's folder")
    _take_arithmetic(welcome["arithmetic"], device)
    parallel = ParallelConfig(tensor=world.size, data_shard=1, reduction_chunks=welcome["reduction_chunks"])
    model = generator_model(shape, resolve_dtype(welcome["dtype"]), world, parallel, partial(initialize, seed=0))
    if world.size == 1:
        refuse_unknown_operators(model)
    apply_compile(model, CompileConfig(**welcome["compile"]), trains=False)
    tokenizer = load_tokenizer(folder, shape.vocab_size)
    leads = world.size > 1 and world.is_main
    config = EngineConfig(**welcome["engine"])
    draft = make_draft(config, model, _history(Path(welcome.get("run", "")), config, world))
    engine = (LeadingEngine if leads else Engine)(model, config, tokenizer, draft)
    work = f"{welcome['name']} samples for process {welcome['pid']} on {welcome['host']}"
    announce("generator: " + start_line(welcome["model"], shape, device, model.dtype, work, world.size))
    return WeightReader(model, world, key), engine


def _history(run: Path, config: EngineConfig, world: World) -> HistoryDraft:
    """For drafting: what the run has sampled already, if this host has its folder.

    Not if ranks share a model: they must all draft the same tokens.
    """
    history = HistoryDraft()
    recalls = config.draft == "auto" and world.size == 1 and (run / CONFIG).is_file()
    if recalls and (count := recall(history, run)):
        announce(f"generator: drafts start from {count} completions of {run}")
    return history


def _take_arithmetic(wanted: str, device: torch.device) -> None:
    if device.type == "cpu":  # on a GPU there is nothing to choose
        with contextlib.suppress(UserError):
            set_arithmetic(wanted, device)
    if (own := arithmetic_of(device)) != wanted:
        raise UserError(
            f"the trainer computes in {wanted}, but a generator on {socket.gethostname()} in {own}; start it on a "
            "machine like the trainer's, or start the run with --arithmetic portable, which works on any CPU"
        )


def _follow(welcome: dict[str, Any], address: str, key: bytes, world: World) -> int:
    over = threading.Event()
    threading.Thread(target=_attend, args=(welcome, address, key, world, over), name="trainer", daemon=True).start()
    try:
        reader, engine = _open(welcome, key, world)
        # torchrun forwards signals to all ranks; the first one ends the others.
        _take_signals(lambda: None)
        try:
            follow(engine, {"take": reader.take})
        finally:
            reader.close()
    finally:
        over.set()
    return 0


def _attend(welcome: dict[str, Any], address: str, key: bytes, world: World, over: threading.Event) -> None:
    """Tells the trainer that this rank is alive, which it could not see: otherwise only the first one talks to it."""
    host, _, port = address.rpartition(":")
    try:
        channel = call(host, int(port), key)
        hello = {"lockstep": __version__, "beside": welcome["name"], "rank": world.rank, "host": socket.gethostname()}
        channel.send(hello | {"pid": os.getpid(), "place": place()})
        while not over.is_set():
            channel.send({"kind": "alive"})
            with contextlib.suppress(TimeoutError):
                channel.receive(welcome["silence_seconds"] / 5)
        channel.close()
    except Closed:
        _end_unless(over)


def _end_unless(over: threading.Event) -> None:
    """Kills this process, whatever its main thread waits for, unless `over` is set soon."""
    if not over.wait(END_SECONDS):
        os._exit(1)


def _take_signals(leave: Callable[[], None]) -> None:
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
