"""One run at a time per folder: a lock that the kernel releases when the process that holds it ends."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lockstep.errors import UserError
from lockstep.observe.logs import log

LOCK = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks `folder` by a lock file, removed afterwards. Raises UserError, naming the holder, if it is locked.

    Logs a warning if the file system has no locks.
    """
    path = folder / LOCK
    descriptor = _lock(path)
    if descriptor is None:
        yield
        return
    try:
        with suppress(OSError):  # a full disk: the lock works without its holder's name
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(path: Path) -> int | None:
    """The descriptor that holds the lock; None if the file system has no locks."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise UserError(
                f"{path.parent}: cannot be written ({error.strerror}); make it writable, or give another --output"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 300).decode(errors="replace")
            os.close(descriptor)
            raise UserError(
                f"{path.parent}: another run is writing to it ({holder or 'just started'}); wait until it ends, "
                "stop it, or give another --output"
            ) from None
        except OSError as error:
            # Network file systems may not support locks.
            log.warning("%s: cannot be locked (%s); make sure that no other run writes to it", path.parent, error)
            os.close(descriptor)
            return None
        # The previous holder may have removed the file between the two calls.
        if path.is_file() and os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
        os.close(descriptor)
