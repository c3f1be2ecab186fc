"""What ends a run early, once it has saved a checkpoint: SIGTERM, SIGINT, and exceptions of its caller's callback."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from lockstep.errors import RunStopped, StopRun
from lockstep.observe import OnMetrics, log
from lockstep.observe.watchdog import EXIT_CODE
from lockstep.parallel import World
from lockstep.parallel.world import AXES

SIGNALS = (signal.SIGTERM, signal.SIGINT)
STOP_RUN, RAISED = -1, -2
"""Beside the numbers of signals: a callback raised StopRun, or another exception."""
EVERY = 4
"""One in this many calls of `asking` asks the other ranks."""


def _nothing() -> None:
    return None


def ends_with_error(reason: int, finished: bool) -> bool:
    """Whether a run that ends for `reason` (of `agreed`) raises: a signal that found it `finished` came too late."""
    return reason == RAISED or (reason in SIGNALS and not finished)


class Interrupted(KeyboardInterrupt):
    """A signal ended what can be repeated by a resumed run. Code that lets a Ctrl-C through also lets this through."""


class StopSignal:
    """Records the signals while it is open. A context manager.

    The loop calls `agreed` once per step. The first signal logs a warning and starts a timer of `seconds`, after which
    the process ends with exit code 124, whatever the main thread is waiting for. A second signal ends it at once, with
    128 + its number. Outside the main thread, where Python cannot handle signals, nothing is recorded.
    """

    def __init__(self, seconds: float, saved: Callable[[], int | None] = _nothing):
        """saved: the step of the newest complete checkpoint, for the message if the time was too short; None: none."""
        self.seconds, self._saved = seconds, saved
        self.received = 0
        self.raised: BaseException | None = None
        """What a callback raised on this rank."""
        self._received_at = 0.0
        self._interrupts = self._within = False
        self._ended = threading.Event()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            # C code that never returns to Python blocks a Python handler, but not this: the byte is sent at once.
            self._reader, self._writer = socket.socketpair()
            self._writer.setblocking(False)
            self._descriptor = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
            threading.Thread(target=self._watch, name="stop signal", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._before:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._descriptor)
            self._writer.close()
        # Its thread may briefly outlive the run with what it references: process groups must go before Python ends.
        self._saved = _nothing

    def guarding(self, callback: OnMetrics | None) -> OnMetrics | None:
        """`callback`, whose exceptions are kept until the run has saved its step."""
        if callback is None:
            return None

        def guarded(step: int, metrics: Mapping[str, float]) -> None:
            try:
                callback(step, metrics)
            except (Exception, SystemExit) as error:
                self.raised = error

        return guarded

    def agreed(self, world: World) -> int:
        """The signal that any rank has received, `STOP_RUN` or `RAISED`, the same on all ranks; 0: none."""
        raised = 0 if self.raised is None else STOP_RUN if isinstance(self.raised, StopRun) else RAISED
        reasons = (RAISED, STOP_RUN, *SIGNALS)
        counts = world.sum([float(reason in (self.received, raised)) for reason in reasons], AXES)
        return next((int(reason) for reason, count in zip(reasons, counts) if count), 0)

    def ending(self, world: World, late: bool = False) -> tuple[Callable[[], None], Callable[[], bool]]:
        """Arguments of `Trainer.asking`, which end its work once a signal has come to any rank.

        late: once half of the seconds to end have passed since then: what takes less is finished.
        """

        def ends(axes: tuple[str, ...]) -> bool:
            waits = self.seconds / 2 if late else 0.0
            own = self.received and time.monotonic() - self._received_at >= waits
            return world.sum([float(own)], axes)[0] > 0

        def interrupt() -> None:
            if ends(AXES):
                raise Interrupted

        return interrupt, partial(ends, tuple(axis for axis in AXES if axis != "pipeline"))

    @contextmanager
    def interrupts(self, at_once: bool = True) -> Iterator[None]:
        """Within this context, the first signal, or an earlier one, interrupts the main thread with Interrupted.

        Only for work that no other rank takes part in, and that leaves nothing half done. at_once: False if it begins
        with something that ranks compute together, in `held`.
        """
        self._within, self._interrupts = True, at_once
        try:
            self._interrupt()
            yield
        finally:
            self._within = self._interrupts = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within `interrupts`, for work that must not end on this rank alone: a signal waits until it is done, or until
        `asking` ends it on all ranks."""
        self._interrupts = False
        yield
        self._interrupts = self._within
        self._interrupt()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Within `held`, for work that may end on this rank alone: signals interrupt it at once again."""
        self._interrupts = self._within
        try:
            self._interrupt()
            yield
        finally:
            self._interrupts = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For work that must be finished: a signal that would interrupt it, in `interrupts` or `released`, waits."""
        before, self._interrupts = self._interrupts, False
        yield
        self._interrupts = before
        self._interrupt()

    def asking(self, group: dist.ProcessGroup) -> Callable[[], None]:
        """A function that all ranks of `group` call equally often in what they compute together within `held`.

        Every few calls it checks whether any of them has a signal, and then raises Interrupted on all of them.
        """
        calls = itertools.count()

        def ask() -> None:
            if not self._within or next(calls) % EVERY:
                return
            received = torch.tensor([self.received])
            dist.all_reduce(received, dist.ReduceOp.MAX, group=group)
            if received.item():
                raise Interrupted

        return ask

    def error(self, number: int, step: int, output: str) -> BaseException:
        """The error that ends the run once `step` is saved (0: in its first step): the callback's own where it was
        raised, else RunStopped, with exit code 128 + the signal."""
        if self.raised is not None:
            return self.raised
        name = "an exception of on_metrics" if number == RAISED else signal.Signals(number).name
        ended = f"after step {step}, which is saved; resume it with --resume"
        if step == 0:
            ended = "in its first step, before there was anything to save; --resume starts it again"
        return RunStopped(f"{output}: {name} ended the run {ended}", exit_code=1 if number == RAISED else 128 + number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Replaces a handler that would end the process."""
        # The watching thread may be later, and interrupted code asks at once.
        self._receive(number)
        self._interrupt()

    def _receive(self, number: int) -> None:
        if not self.received:
            self._received_at = time.monotonic()
            self.received = number

    def _interrupt(self) -> None:
        if self.received and self._interrupts:
            self._interrupts = False
            raise Interrupted

    def _watch(self) -> None:
        first = True
        while byte := self._reader.recv(1):
            if byte[0] not in SIGNALS:
                continue
            if not first:
                os._exit(128 + byte[0])
            first = False
            self._receive(byte[0])
            # Separate threads: a blocked terminal must hold up neither the deadline nor a second signal.
            for work in (self._deadline, self._say):
                threading.Thread(target=work, daemon=True).start()
        self._reader.close()

    def _say(self) -> None:
        name = signal.Signals(self.received).name
        log.warning(
            "%s: the run saves and ends, within %.0f s (faults.stop_seconds); a second signal ends it at once, unsaved",
            name,
            self.seconds,
        )

    def _deadline(self) -> None:
        if not self._ended.wait(self.seconds):
            step = self._saved()
            there = "It has no complete checkpoint; --resume starts it again"
            if step is not None:
                there = f"Its newest complete checkpoint is from step {step}; --resume continues from there"
            log.critical(
                "%s came %.0f s ago (faults.stop_seconds) and the run has not ended; exiting now. "
                "%s; --checkpoint.every N saves every N steps",
                signal.Signals(self.received).name,
                self.seconds,
                there,
            )
            os._exit(EXIT_CODE)
