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

from lockstep.rl.actors.ranks import Group, end_ranks, start_ranks

GLANCE = 0.1
"""Seconds between two looks at the lease."""
LEASE_SECONDS = 5.0
"""An actor that is not asked for so long ends its generator and itself: Monarch lets it live when its client dies."""
SPOKEN = 1 << 16
"""Bytes of each rank's output that one answer carries at most."""


class GeneratorHost(Actor):
    """One generator, for whoever asks `news` of it all the time."""

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
        """Where it is started."""
        with self._changed:
            self._asked, self._group = time.monotonic(), (Group(**group), key)
            self._changed.notify_all()
        return socket.gethostname()

    @endpoint
    def news(self) -> tuple[list[bytes], list[int | None], str]:
        """What each rank has said since the last call, and its exit code; why they could not be started."""
        with self._changed:
            self._asked = time.monotonic()
            codes = [rank.poll() for rank in self._ranks]  # before its output, so that nothing is said after it
            said = [os.pread(output.fileno(), SPOKEN, told) for output, told in zip(self._outputs, self._told)]
            self._told = [told + len(part) for told, part in zip(self._told, said)]
            # One with more to say has not ended yet.
            return said, [None if len(part) == SPOKEN else code for part, code in zip(said, codes)], self._problem

    @endpoint
    def end(self) -> None:
        """Returns once none of its processes is left."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
            end_ranks(self._ranks)

    def _watch(self) -> None:
        # The ranks die with the thread that has started them, which is this one.
        with self._changed:
            while not self._over and time.monotonic() - self._asked < LEASE_SECONDS:
                if self._group and not self._outputs:
                    self._start(*self._group)
                self._changed.wait(GLANCE)
            end_ranks(self._ranks)
        time.sleep(LEASE_SECONDS if self._over else 0)
        os._exit(1)  # where Monarch has not ended it by now, its client is gone

    def _start(self, group: Group, key: str) -> None:
        # Files without a name, so that none is left behind.
        self._outputs = [tempfile.TemporaryFile() for _ in range(group.tensor)]  # noqa: SIM115
        self._told = [0] * group.tensor
        try:
            self._ranks = start_ranks(group, key, self._outputs)
        except OSError as error:
            self._problem = str(error)
