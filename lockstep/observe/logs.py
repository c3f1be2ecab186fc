"""Logging: rank 0 to the terminal, and with several ranks each to a file."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

log = logging.getLogger("lockstep")


@contextmanager
def open_logs(run: Path, rank: int = 0, ranks: int = 1) -> Iterator[None]:
    """Within this context, `lockstep`'s loggers write to stderr (rank 0) and to `logs/rank_N.log` (several ranks).

    An exception that ends the run is logged to its rank's file.
    """
    handlers: list[logging.Handler] = []
    # A caller that has set up logging gets all messages through the root logger.
    if rank == 0 and not logging.getLogger().handlers:
        handlers.append(_Terminal())
        handlers[-1].setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    if ranks > 1:
        (run / "logs").mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(run / "logs" / f"rank_{rank}.log"))
        handlers[-1].setFormatter(logging.Formatter(f"%(asctime)s rank {rank} %(levelname)s: %(message)s"))
    before = log.level
    log.setLevel(logging.INFO)
    for handler in handlers:
        log.addHandler(handler)
    try:
        yield
    except BaseException as error:
        for handler in handlers:
            if isinstance(handler, logging.FileHandler):
                handler.handle(log.makeRecord(log.name, logging.ERROR, "", 0, "ended by %r", (error,), sys.exc_info()))
        raise
    finally:
        log.setLevel(before)
        for handler in handlers:
            log.removeHandler(handler)
            handler.close()


class _Terminal(logging.StreamHandler[TextIO]):
    """Writes to the current sys.stderr: a progress bar replaces it."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)
