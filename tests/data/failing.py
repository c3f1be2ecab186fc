"""An encoder that fails in its worker; in a file of its own, which the worker imports at once."""

import os
import signal

from lockstep.data.encode import TextEncoder


class Fails(TextEncoder):
    """Raises, or ends its process where the first text says so."""

    def encode(self, batch):
        if batch[0].text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("no such token")
