"""Ranks whose torchrun has died end themselves: nothing else would, and they hold the run's folder and memory."""

from __future__ import annotations

import os
import threading
import time

from lockstep.observe.logs import log

NAME = "torchrun watch"
SECONDS = 2.0
"""Between two checks."""


def end_with_torchrun() -> None:
    """Starts a thread that ends this process once its parent, torchrun, has died; does nothing without torchrun."""
    # If a script started ranks in the background, their parent may end.
    if "TORCHELASTIC_RUN_ID" in os.environ and not any(t.name == NAME for t in threading.enumerate()):
        threading.Thread(target=_watch, args=(os.getppid(),), name=NAME, daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(SECONDS)
    try:
        log.critical("torchrun (process %d) has died, so this rank ends as well; --resume continues the run", parent)
    finally:
        os._exit(1)
