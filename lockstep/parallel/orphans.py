"""Ranks whose torchrun is gone end themselves: nothing else would, and they hold the run's folder and the memory."""

from __future__ import annotations

import os
import threading
import time

from lockstep.observe.logs import log

NAME = "torchrun watch"
SECONDS = 2.0
"""Between two looks."""


def end_with_torchrun() -> None:
    """Starts a thread that ends this process once its parent, torchrun, has died; without torchrun it does nothing."""
    # Of ranks that a script has put into the background, the parent ends rightly.
    if "TORCHELASTIC_RUN_ID" in os.environ and not any(t.name == NAME for t in threading.enumerate()):
        threading.Thread(target=_watch, args=(os.getppid(),), name=NAME, daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(SECONDS)
    try:
        log.critical("torchrun (process %d) has died, so this rank ends too; --resume continues the run", parent)
    finally:
        os._exit(1)
