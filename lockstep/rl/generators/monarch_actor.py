"""The Monarch actor that starts a generator's processes on its host."""

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

GLANCE = 0.1
"""Seconds between checks of the lease."""
LEASE_SECONDS = 5.0
"""An actor not asked for this long ends its generator and itself: Monarch keeps it alive when its client dies."""
SPOKEN = 1 << 16
"""Most bytes of each rank's output in one answer."""


class GeneratorHost(Actor):
    """One generator, for as long as someone keeps asking for its `news`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._group: tuple[Group, str] | None = None
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._outputs: list[IO[bytes]] = []
        self._told: list[int] = []
        self._problem = ""
        self._over = False
        self._asked = time.monotonic()
        threading.Thread(target=self._watch, name="generator", daemon=True).start()

    @endpoint
    def start(self, group: dict[str, Any], key: str) -> str:
        """Returns the host on which it is started."""
        with self._changed:
            self._asked, self._group = time.monotonic(), (Group(**group), key)
            self._changed.notify_all()
        return socket.gethostname()

    @endpoint
    def news(self) -> tuple[list[bytes], list[int | None], str]:
        """What each rank has printed since the last call, and its exit code; and why they could not be started."""
        with self._changed:
            self._asked = time.monotonic()
            codes = [rank.poll() for rank in self._ranks]  # before its output, so that none can follow
            said = [os.pread(output.fileno(), SPOKEN, told) for output, told in zip(self._outputs, self._told)]
            self._told = [told + len(part) for told, part in zip(self._told, said)]
            # A rank with more output has not ended yet.
            return said, [None if len(part) == SPOKEN else code for part, code in zip(said, codes)], self._problem

    @endpoint
    def end(self) -> None:
        """Returns once all of its processes are gone."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
            end_ranks(self._ranks)

    def _watch(self) -> None:
        # The ranks die with the thread that started them, which is this one.
        with self._changed:
            while not self._over and time.monotonic() - self._asked < LEASE_SECONDS:
                if self._group and not self._outputs:
                    self._start(*self._group)
                self._changed.wait(GLANCE)
            end_ranks(self._ranks)
        time.sleep(LEASE_SECONDS if self._over else 0)
        os._exit(1)  # if Monarch has not ended it by now, its client is gone

    def _start(self, group: Group, key: str) -> None:
        # Unnamed files, so that none is left behind.
        self._outputs = [tempfile.TemporaryFile() for _ in range(group.tensor)]  # noqa: SIM115
        self._told = [0] * group.tensor
        try:
            self._ranks = start_ranks(group, key, self._outputs)
        except OSError as error:
            self._problem = str(error)
