"""Ends ranks whose torchrun has died: nothing else would end them, and they occupy memory and the run's folder."""

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
    # Without torchrun, the parent may be a script that started the ranks in the background and ended.
    if "TORCHELASTIC_RUN_ID" in os.environ and not any(t.name == NAME for t in threading.enumerate()):
        threading.Thread(target=_watch, args=(os.getppid(),), name=NAME, daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(SECONDS)
    try:
        log.critical("torchrun (process %d) has died, so this rank ends as well; --resume continues the run", parent)
    finally:
        os._exit(1)
