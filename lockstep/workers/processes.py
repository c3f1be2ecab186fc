"""Ends processes with all their descendants, even those that left their group or lost their parent, and limits them."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def adopt_orphans() -> None:
    """Makes this process, not init, the new parent of descendants whose parent ends.

    Linux only: elsewhere it does nothing, and only process groups are killed.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent ends. Linux only."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def limit_memory(max_bytes: int) -> None:
    """Limits this process's private writable memory (RLIMIT_DATA), which children inherit; no limit on macOS.

    RLIMIT_AS would also count libraries and reserved memory: several gigabytes if torch is imported.
    """
    with contextlib.suppress(OSError, ValueError):
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = max_bytes if hard == resource.RLIM_INFINITY else min(max_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def extend_time_limit(seconds: float) -> None:
    """Lets this process use `seconds` more of processor time, in whole seconds; then SIGXCPU ends it."""
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    limit = math.ceil(used + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def descendants(process: int, spared: frozenset[int] = frozenset()) -> list[int]:
    """All descendants of a process, nearest first, except those in `spared` and their descendants.

    Empty if the kernel does not report them.
    """
    result: list[int] = []
    level = [process]
    while level:
        level = [child for parent in level for child in _children(parent) if child not in spared]
        result += level
    return result


def is_stopped(child: int) -> bool:
    """Whether a child of this process is stopped by a signal; False if the system does not report it."""
    with contextlib.suppress(ChildProcessError):  # it has ended
        if hasattr(os, "waitid"):  # macOS has it since Python 3.13
            return os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def end_tree(process: int, spared: frozenset[int] = frozenset(), seconds: float = 10.0) -> None:
    """Kills and reaps a child that leads its group, then all descendants of this process except `spared`.

    A group is killed atomically, so processes that keep forking in it cannot outrun this.
    """
    deadline = time.monotonic() + seconds
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)
    while time.monotonic() < deadline:
        left = descendants(os.getpid(), spared)
        for pid in {process, *left}:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                if os.waitpid(pid, os.WNOHANG) == (0, 0):
                    os.kill(pid, signal.SIGKILL)
                    left.append(pid)
        # A grandchild becomes a child of this process when its parent is reaped, and is then reaped too.
        if not left:
            return
        time.sleep(0.001)


def end_marked(variable: str, seconds: float = 10.0) -> None:
    """Kills all processes whose initial environment contains `variable`, a `NAME=VALUE`, which children inherit.

    It needs no living ancestor. Linux only: elsewhere it does nothing.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        marked = [process for process in Path("/proc").glob("[0-9]*") if _has(process, variable.encode())]
        for process in marked:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(process.name), signal.SIGKILL)
        if not marked:  # zombies have no environment
            return
        time.sleep(0.001)


def _has(process: Path, variable: bytes) -> bool:
    try:
        return variable in (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _children(process: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(OSError):
                children += map(int, (thread / "children").read_text().split())
    return children


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
