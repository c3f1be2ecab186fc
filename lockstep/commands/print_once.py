"""Prints messages of torchrun's ranks once per host if several ranks print the same."""

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
"""Seconds that a rank waits for its host's first rank to print the same text before it prints it with its rank."""
RANK_PROCESS = "LOCKSTEP_RANK_PROCESS"
"""Environment variable: pid of the process that torchrun started, and its error file."""


def print_once(text: str, head: str = "lockstep: ", ends: bool = False) -> None:
    """Prints `text` to stderr, unless a rank of this host has printed it.

    ends: this is the rank's last message, so that ranks with other texts need not wait for it.
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
    """Prints log records from before the run opens its logs."""

    def emit(self, record: logging.LogRecord) -> None:
        print_once(f"{record.levelname.lower()}: {printable(record.getMessage())}")


def ranks_folder() -> Path | None:
    """torchrun's folder for this host and attempt; None for a process that is not one of several ranks of a host.

    First called before child processes start, which inherit the environment but are not ranks."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if not file or os.environ.get("LOCAL_WORLD_SIZE", "1") == "1":
        return None
    this_process = f"{os.getpid()} {file}"
    if not os.environ.get(RANK_PROCESS, "").endswith(f" {file}"):
        os.environ[RANK_PROCESS] = this_process
    return Path(file).parent.parent if os.environ[RANK_PROCESS] == this_process else None


def _create(file: Path) -> bool:
    """Creates the file; whether it is new. True if that cannot be determined: printing twice is better than never."""
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
    """Defers SIGINT, and SIGTERM, with which torchrun ends the ranks once one has failed, until the context exits."""
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
