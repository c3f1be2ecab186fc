"""What ends a run early: SIGTERM, SIGINT, and exceptions of its caller's callback.

One rule: sampling, grading, scoring and validation can be interrupted; an update, once begun, completes with its step.
Either way the run is saved as of its last complete step.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, Literal

from lockstep.errors import RunStopped, StopRun
from lockstep.observe import OnMetrics, log
from lockstep.observe.watchdog import EXIT_CODE
from lockstep.parallel import World
from lockstep.parallel.world import AXES

SIGNALS = (signal.SIGTERM, signal.SIGINT)
STOP_RUN, RAISED = -1, -2
"""Reasons to stop besides the numbers of signals: a callback raised StopRun, or another exception."""


def _nothing() -> None:
    return None


class Interrupted(KeyboardInterrupt):
    """A signal interrupted work that a resumed run repeats. Code that lets a Ctrl-C through also lets this through."""


class StopSignal:
    """Records the signals while it is open. A context manager.

    The first signal logs a warning and starts a timer of `seconds`, after which the process ends with exit code 124,
    even if the main thread is blocked. A second signal ends it at once, with 128 + its number. Outside the main
    thread, where Python cannot handle signals, nothing is recorded.
    """

    def __init__(self, seconds: float, saved: Callable[[], int | None] = _nothing):
        """saved: the step of the newest complete checkpoint, for the message if time runs out; None: none."""
        self.seconds, self._saved = seconds, saved
        self.received = 0
        self.raised: BaseException | None = None
        """The exception of a callback on this rank."""
        self._mode: Literal["", "alone", "shared"] = ""
        self._deferrals = 0
        self._ended = threading.Event()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            # C code that never returns to Python blocks a Python handler, but not this: the byte is sent at once.
            self._reader, self._writer = socket.socketpair()
            self._writer.setblocking(False)
            self._descriptor = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
            threading.Thread(target=self._watch, name="stop signal", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        self._ended.set()
        # The watching thread may briefly outlive the run, but must not keep its process groups alive at exit.
        self._saved = _nothing

    def release(self) -> None:
        """Restores the handlers of before. The deadline of a signal that was received stays until the context ends."""
        if self._before:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._descriptor)
            self._writer.close()
            self._before = {}

    def guarding(self, callback: OnMetrics | None) -> OnMetrics | None:
        """`callback`, whose exceptions are raised once the run has saved its step."""
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

    @contextmanager
    def interruptible(self, shared: bool = False) -> Iterator[None]:
        """Within it, a signal raises Interrupted in this thread, the main one; so does an earlier signal.

        shared: the work is shared with other ranks, which end together, at the points where they call `poll`. Has no
        effect within `deferred`.
        """
        before, self._mode = self._mode, "shared" if shared else "alone"
        try:
            self._interrupt()
            yield
        finally:
            self._mode = before

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Within it, signals interrupt nothing: they take effect at its end."""
        self._deferrals += 1
        try:
            yield
        finally:
            self._deferrals -= 1
        self._interrupt()

    def polling(self, count_ranks: Callable[[float], float], every: int = 1) -> Callable[[], None]:
        """A function that ranks call equally often in work that they share, which raises Interrupted on all of them.

        count_ranks: sums a number over these ranks. every: one call in this many communicates.
        """
        calls = itertools.count()

        def poll() -> None:
            if self._mode != "shared" or self._deferrals or next(calls) % every:
                return
            if count_ranks(float(self.received > 0)):
                raise Interrupted

        return poll

    def error(self, reason: int, step: int, output: str) -> BaseException:
        """The error that ends the run for `reason` (of `agreed`) once `step` is saved (0: in its first step): the
        callback's exception, else RunStopped, with exit code 128 + the signal."""
        if self.raised is not None:
            return self.raised
        name = "an exception of on_metrics" if reason == RAISED else signal.Signals(reason).name
        ended = f"after step {step}, which is saved; resume it with --resume"
        if step == 0:
            ended = "in its first step, before there was anything to save; --resume starts it again"
        return RunStopped(f"{output}: {name} ended the run {ended}", exit_code=1 if reason == RAISED else 128 + reason)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        # Does not rely on the watching thread: interruptible work ends at once.
        self._receive(number)
        self._interrupt()

    def _receive(self, number: int) -> None:
        if not self.received:
            self.received = number

    def _interrupt(self) -> None:
        if self.received and self._mode == "alone" and not self._deferrals:
            self._mode = ""  # once
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
            for work in (self._deadline, self._warn):
                threading.Thread(target=work, daemon=True).start()
        self._reader.close()

    def _warn(self) -> None:
        name = signal.Signals(self.received).name
        log.warning(
            "%s: the run saves and ends, within %.0f s (faults.stop_seconds); a second signal ends it at once, unsaved",
            name,
            self.seconds,
        )

    def _deadline(self) -> None:
        if not self._ended.wait(self.seconds):
            step = self._saved()
            newest = "It has no complete checkpoint; --resume starts it again"
            if step is not None:
                newest = f"Its newest complete checkpoint is from step {step}; --resume continues from there"
            log.critical(
                "%s came %.0f s ago (faults.stop_seconds) and the run has not ended; exiting now. "
                "%s; --checkpoint.every N saves every N steps",
                signal.Signals(self.received).name,
                self.seconds,
                newest,
            )
            os._exit(EXIT_CODE)
