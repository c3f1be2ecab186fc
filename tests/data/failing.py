"""Encoders that fail in their worker or look at it; in a file of its own, which the worker imports at once."""

import os
import signal
import sys

from lockstep.data.encode import TextEncoder


class Fails(TextEncoder):
    """Raises, or ends its process where the first text says so."""

    def encode(self, batch):
        if batch[0].text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("no such token")


class Imported(TextEncoder):
    """Encodes the texts, then raises with the packages that its process has imported by then."""

    def encode(self, batch):
        super().encode(batch)
        raise ValueError(" ".join(name for name in sys.modules if "." not in name))
