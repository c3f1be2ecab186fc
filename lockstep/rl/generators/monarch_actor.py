"""The Monarch actor that runs a generator's processes on its host."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import threading
import time
from typing import IO, Any

from monarch.actor import Actor, endpoint

from lockstep.rl.generators.ranks import Group, end_ranks, start_ranks

CHECK_SECONDS = 0.1
"""Seconds between checks of the lease."""
LEASE_SECONDS = 5.0
"""Without a poll for this long, the actor ends its generator and itself: Monarch keeps it alive without its client."""
OUTPUT_BYTES = 1 << 16
"""Most bytes of each rank's output in one response."""


class GeneratorHost(Actor):
    """One generator, which runs as long as it is polled."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._group: tuple[Group, str] | None = None
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._outputs: list[IO[bytes]] = []
        self._offsets: list[int] = []
        self._problem = ""
        self._ended = False
        self._last_poll = time.monotonic()
        threading.Thread(target=self._watch, name="generator", daemon=True).start()

    @endpoint
    def start(self, group: dict[str, Any], key: str) -> str:
        """Starts the generator; returns the host's name."""
        with self._changed:
            self._last_poll, self._group = time.monotonic(), (Group(**group), key)
            self._changed.notify_all()
        return socket.gethostname()

    @endpoint
    def poll(self) -> tuple[list[bytes], list[int | None], str]:
        """Each rank's output since the last call and its exit code, and why the ranks could not be started."""
        with self._changed:
            self._last_poll = time.monotonic()
            # Before reading, so that an ended rank's output is complete.
            codes = [rank.poll() for rank in self._ranks]
            outputs = zip(self._outputs, self._offsets)
            parts = [os.pread(file.fileno(), OUTPUT_BYTES, offset) for file, offset in outputs]
            self._offsets = [offset + len(part) for offset, part in zip(self._offsets, parts)]
            # A rank with more output counts as running.
            codes = [None if len(part) == OUTPUT_BYTES else code for part, code in zip(parts, codes)]
            return parts, codes, self._problem

    @endpoint
    def end(self) -> None:
        """Returns once all processes have ended."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            end_ranks(self._ranks)

    def _watch(self) -> None:
        # The ranks die with the thread that started them, which is this one.
        with self._changed:
            while not self._ended and time.monotonic() - self._last_poll < LEASE_SECONDS:
                if self._group and not self._outputs:
                    self._start(*self._group)
                self._changed.wait(CHECK_SECONDS)
            end_ranks(self._ranks)
        time.sleep(LEASE_SECONDS if self._ended else 0)
        os._exit(1)  # if Monarch has not ended it by now, its client is gone

    def _start(self, group: Group, key: str) -> None:
        # Unnamed files, so that none is left behind.
        self._outputs = [tempfile.TemporaryFile() for _ in range(group.tensor)]  # noqa: SIM115
        self._offsets = [0] * group.tensor
        try:
            self._ranks = start_ranks(group, key, self._outputs)
        except OSError as error:
            self._problem = str(error)
