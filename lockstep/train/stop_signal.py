"""SIGTERM and SIGINT: the step is finished, saved, and the run ends."""

from __future__ import annotations

import os
import signal
import socket
import threading
from types import FrameType
from typing import Any

from lockstep.errors import RunStopped
from lockstep.observe import log
from lockstep.observe.watchdog import EXIT_CODE
from lockstep.parallel import World
from lockstep.parallel.world import AXES

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignal:
    """Notes the signals while it is open. A context manager.

    The loop asks `agreed` once a step. The first signal is answered by a warning, and from it on a thread counts
    `seconds`: whatever the main thread waits for then, the process ends with exit code 124. A second signal ends it at
    once, with 128 + its number. Outside of the main thread, where Python cannot take signals, nothing is noted.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.received = 0
        self._ended = threading.Event()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            # C code that never returns to Python holds up a Python handler, but not this: the byte is sent at once.
            self._reader, self._writer = socket.socketpair()
            self._writer.setblocking(False)
            self._descriptor = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            self._before = {number: signal.signal(number, _ignore) for number in SIGNALS}
            threading.Thread(target=self._watch, name="stop signal", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._before:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._descriptor)
            self._writer.close()

    def agreed(self, world: World) -> int:
        """The signal that any rank has received, the same on all of them; 0: none."""
        counts = world.sum([float(self.received == number) for number in SIGNALS], AXES)
        return next((int(number) for number, count in zip(SIGNALS, counts) if count), 0)

    def error(self, number: int, step: int, output: str) -> RunStopped:
        """What ends the run once `step` is saved: with exit code 128 + the signal's number."""
        name = signal.Signals(number).name
        return RunStopped(
            f"{output}: {name} ended the run after step {step}, which is saved; continue it with --resume",
            exit_code=128 + number,
        )

    def _watch(self) -> None:
        while byte := self._reader.recv(1):
            if byte[0] not in SIGNALS:
                continue
            if self.received:
                os._exit(128 + byte[0])
            self.received = byte[0]
            # Threads of their own: whoever cannot write to the terminal holds up neither deadline nor second signal.
            for work in (self._deadline, self._say):
                threading.Thread(target=work, daemon=True).start()
        self._reader.close()

    def _say(self) -> None:
        name = signal.Signals(self.received).name
        log.warning("%s: this step is finished and saved, then the run ends; a second signal ends it at once", name)

    def _deadline(self) -> None:
        if not self._ended.wait(self.seconds):
            log.critical(
                "%s came %.0f s ago (faults.stop_seconds) and the run has not come to its end; it is left as it is",
                signal.Signals(self.received).name,
                self.seconds,
            )
            os._exit(EXIT_CODE)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Replaces a handler that would end the process."""
