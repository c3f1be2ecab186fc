"""What a task may do wrong, in a reward and in a conversation alike, and the cause that each failure has."""

import os
import signal
import struct
import sys
import time
from contextlib import suppress

kept = []

CAUSES = {
    "raises": "raised",
    "exits": "raised",
    "is_nan": "invalid",
    "blocks": "timeout",
    "takes_memory": "memory",
    "prints": "output",
    "exits_at_once": "killed",
    "kills_itself": "killed",
    "kills_its_supervisor": "killed",
    "stops_its_supervisor": "killed",
    "forks": "processes",
    "writes_into_pipes": "killed",
}
"""By the method's name. The tests give a worker 256 MiB, 8 processes and 64 KiB of output."""


class Misbehaving:
    """Each method does what its name says; one that returns None, where the caller goes on, did nothing wrong."""

    def fine(self):
        pass

    def raises(self):
        raise ValueError("no")

    def exits(self):
        sys.exit(0)

    def is_nan(self):
        return float("nan")

    def blocks(self):
        time.sleep(1000)

    def takes_memory(self):
        kept.append(bytearray(2**33))

    def prints(self):
        for _ in range(1000):
            print("x" * 10**6)

    def exits_at_once(self):
        os._exit(0)

    def kills_itself(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def kills_its_supervisor(self):
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)

    def freezes(self):
        os.kill(os.getpid(), signal.SIGSTOP)

    def stops_its_supervisor(self):
        os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(1000)

    def forks(self):
        # Out of the group and orphaned, never more than 24: what is tested is that these are found and ended.
        for _ in range(24):
            self.leaves_a_process()
        time.sleep(1000)

    def leaves_a_process(self):
        if (child := os.fork()) == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(1000)
            os._exit(0)
        os.waitpid(child, 0)

    def returns_twice(self):
        os.fork()

    def writes_into_pipes(self):
        _write_into_pipes(b"\xff\xff\xff\xff nonsense")

    def forges(self, kind, number, body):
        """A message such as its worker sends."""
        message = f'["{kind}", {number}, true]\n{body}'.encode()
        _write_into_pipes(struct.pack("<I", len(message)) + message)
        time.sleep(1000)


def _write_into_pipes(data):
    for pipe in range(3, 200):
        with suppress(OSError):
            os.write(pipe, data)
