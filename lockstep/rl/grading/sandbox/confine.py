"""Runs between the caller and model-written code: confines itself, forks the code, and reports how it ended.

Three processes. The first waits, and kills everything if there is no process namespace. The second, init of a process
namespace, drops all privileges it can; when it ends, the kernel kills the rest of the namespace. The third has the
limits and becomes the code. `settings` is plain data, see `run.py`.
"""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import signal
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lockstep.rl.grading.sandbox import landlock, namespaces
from lockstep.workers.processes import adopt_orphans, die_with_parent, end_tree

NAMESPACES, KEYS, FILES, USER, LANDLOCK = "namespaces", "keys", "files", "user", "landlock"
"""Protections: no network and no other processes; none of the caller's keys; a separate root file system; an
unprivileged user instead of root; no mounts, TCP or signals, even if the other protections allow them."""


def main(settings: dict[str, Any], source: int, status: int) -> None:
    """Runs the code read from `source`; reports protections and its end to `status`, one JSON object per line."""
    os.set_inheritable(status, False)  # else the code could write its report
    with os.fdopen(source, "rb") as file:
        text = file.read()
    missing: dict[str, str] = {}
    scratch = ""
    adopt_orphans()
    die_with_parent()
    number = os.getpid()
    may_drop = USER not in settings["without"] and namespaces.open_to_all(settings["python"])
    _try(settings, missing, NAMESPACES, lambda: namespaces.leave(number, may_drop))
    if missing:
        scratch = tempfile.mkdtemp(prefix="sandbox-")
        os.chmod(scratch, 0o777)
    first = os.fork()
    if first == 0:
        try:
            _first(settings, text, status, missing, scratch, number)
        except BaseException as error:
            _report(status, {"error": f"{type(error).__name__}: {error}"})
        finally:
            os._exit(1)

    def end(*_: object) -> None:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(first, signal.SIGKILL)
            os.waitpid(first, 0)  # returns once its whole namespace is gone
        if scratch:
            end_tree(first)
            shutil.rmtree(scratch, ignore_errors=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    end()


def _first(
    settings: dict[str, Any], text: bytes, status: int, missing: dict[str, str], scratch: str, number: int
) -> None:
    """Confines itself, starts the code and waits for it."""
    readable, above = settings["readable"], 1 if os.getuid() == 0 else 2
    # Before root becomes an unprivileged user, whose keyring quota is small.
    _try(settings, missing, KEYS, namespaces.leave_keyring)
    if NAMESPACES not in missing:
        _try(settings, missing, FILES, lambda: namespaces.build_root(readable, settings["scratch_mib"] * 2**20))
    else:
        missing[FILES] = "needs the namespaces"
    has_root = FILES not in missing
    if not has_root:
        if not scratch and settings["allow_unprotected"]:
            raise OSError(missing[FILES])
        os.chdir(scratch or "/")
    if has_root or namespaces.open_to_all(settings["python"]):
        _try(settings, missing, USER, lambda: namespaces.drop_root(number))
    elif os.getuid() == 0:
        missing[USER] = f"only root can run {settings['python']} without a separate root file system"
    die_with_parent()  # not earlier, as changing the user resets it
    scratch_here, visible = os.getcwd(), ["/"] if has_root else readable
    _try(settings, missing, LANDLOCK, lambda: landlock.restrict(visible, [scratch_here, *namespaces.DEVICES]))
    _report(status, {"missing": missing})
    if (missing and not settings["allow_unprotected"]) or settings["probe"]:
        return
    with open("main.py", "wb") as file:
        file.write(text)
    code = os.fork()
    if code == 0:
        # The second process has the same user as the code and, unless it is root, so has the first.
        alone = NAMESPACES not in missing or (settings["root"] and USER not in missing)
        _limit(settings, settings["processes"] + above if alone else None)
        os.execve(settings["python"], [settings["python"], "-I", "-S", "main.py"], {})
    # Orphans of the code are reaped here, too.
    while True:
        process, wait_status = os.wait()
        if process == code:
            _report(status, {"exit": os.waitstatus_to_exitcode(wait_status)})
            return


def _limit(settings: dict[str, Any], processes: int | None) -> None:
    """Sets resource limits. processes: None if the user has processes outside, as the kernel counts them per user."""
    memory, scratch = settings["memory_mib"] * 2**20, settings["scratch_mib"] * 2**20
    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: math.ceil(settings["seconds"]) + 1,
        resource.RLIMIT_FSIZE: scratch,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        **({} if processes is None else {resource.RLIMIT_NPROC: processes}),
    }
    for kind, limit in limits.items():
        _, hard = resource.getrlimit(kind)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))


def _try(settings: dict[str, Any], missing: dict[str, str], name: str, protect: Callable[[], None]) -> None:
    if name in settings["without"]:
        missing[name] = "left out"
        return
    try:
        protect()
    except (OSError, AttributeError) as error:  # AttributeError: the C library lacks the call
        missing[name] = str(error)


def _report(status: int, message: dict[str, Any]) -> None:
    os.write(status, json.dumps(message).encode() + b"\n")
