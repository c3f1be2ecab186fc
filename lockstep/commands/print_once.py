"""Messages of torchrun's ranks: what several ranks of a host print alike is printed once."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from lockstep.commands.terminal import printable

WAIT = 3.0
"""Seconds that a rank waits for its host's first rank to print the same before it prints, with its own number."""
RANK_PROCESS = "LOCKSTEP_RANK_PROCESS"
"""Environment variable: the process that torchrun started, and its file."""


def print_once(text: str, head: str = "lockstep: ", ends: bool = False) -> None:
    """Prints `text` to stderr, unless a rank of this host has printed it.

    ends: this rank prints nothing afterwards; the others, if their text is another, need not wait for it.
    """
    folder = ranks_folder()
    if folder is None:
        _print(head, text)
        return
    printed, ended = folder / f"printed-{sha256(text.encode()).hexdigest()}", folder / "first-rank-ended"
    is_first = os.environ.get("LOCAL_RANK") == "0"
    with _signals_later():
        deadline = time.monotonic() + WAIT
        while not (is_first or os.path.exists(printed) or os.path.exists(ended) or time.monotonic() > deadline):
            time.sleep(0.02)
        if _create(printed):
            _print(head, text)
        if is_first and ends:
            _create(ended)


class PrintOnce(logging.Handler):
    """Prints what ranks log before their run has opened its logs."""

    def emit(self, record: logging.LogRecord) -> None:
        print_once(f"{record.levelname.lower()}: {printable(record.getMessage())}")


def ranks_folder() -> Path | None:
    """torchrun's folder for this host and attempt, made anew for each; None for a process that has no such ranks
    beside it. First called before there are child processes: they inherit the environment and are no ranks."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if not file or os.environ.get("LOCAL_WORLD_SIZE", "1") == "1":
        return None
    own = f"{os.getpid()} {file}"
    if not os.environ.get(RANK_PROCESS, "").endswith(f" {file}"):
        os.environ[RANK_PROCESS] = own
    return Path(file).parent.parent if os.environ[RANK_PROCESS] == own else None


def _create(file: Path) -> bool:
    """Whether the file was not there. If that cannot be known, it counts as not there: better twice than never."""
    with suppress(OSError):
        try:
            file.touch(exist_ok=False)
        except FileExistsError:
            return False
    return True


def _print(head: str, text: str) -> None:
    rank = os.environ.get("RANK", "0")
    print(f"{head}{'' if rank == '0' else f'rank {rank}: '}{text}", file=sys.stderr, flush=True)


@contextmanager
def _signals_later() -> Iterator[None]:
    """SIGTERM, by which torchrun ends the ranks once one has failed, and SIGINT take effect after this context."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    before = {
        number: signal.signal(number, lambda n, _: arrived.append(n)) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        for late in arrived:
            signal.raise_signal(late)
