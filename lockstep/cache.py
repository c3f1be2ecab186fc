"""Where compiled code and measurements are kept between processes, and what they depend on."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import stat
import tempfile
import warnings
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from lockstep.errors import UserError


class UnsafeCache(UserError):
    """Other users could put code into the cache folder that this process would run; says what to do about it."""


def cache_folder() -> Path:
    """`lockstep` in the user's cache folder (XDG_CACHE_HOME, or ~/.cache); created for its owner only if missing.

    If it is not writable, a private temporary folder, with a warning. Raises UnsafeCache for a folder of another user,
    or one that others can write to.
    """
    folder = _wanted()
    try:
        _make(folder)
        problem = "" if os.access(folder, os.W_OK | os.X_OK) else "no permission to write"
    except OSError as error:
        problem = error.strerror or str(error)
    else:
        require_private(folder)
    if problem:
        folder = _instead_of(folder, problem)
        require_private(folder)
    return folder


def _make(folder: Path) -> None:
    """Creates a folder, and those above it that are missing, for their owner only."""
    if not folder.parent.is_dir():
        _make(folder.parent)
    folder.mkdir(exist_ok=True, mode=0o700)


def require_private(path: Path, elsewhere: str = "set XDG_CACHE_HOME to a folder of your own") -> None:
    """Raises UnsafeCache unless only this user can write to `path`, a folder or a file; root may own a file.

    `elsewhere`: what else the user can do about it.
    """
    if not hasattr(os, "geteuid"):
        return
    found, user = path.stat(), os.geteuid()
    owners = (user,) if stat.S_ISDIR(found.st_mode) else (user, 0)
    link = path.lstat().st_uid  # if it is one: whoever owns it can let it lead elsewhere at any time
    if found.st_uid not in owners or link not in (user, 0):
        owner = link if found.st_uid in owners else found.st_uid
        raise UnsafeCache(
            f"{path}: belongs to user {owner}, but this process runs as user {user}; compiled code in it could "
            f"be anyone's. Give it to this user (chown -hR {user} {path}), or {elsewhere}"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnsafeCache(
            f"{path}: other users can write to it (mode {stat.S_IMODE(found.st_mode):o}), so compiled code in it could "
            f"be theirs. Delete it (rm -r {path}; it will be recreated), or {elsewhere}"
        )


def _wanted() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"
    except RuntimeError:  # a user without a home
        return Path("/nonexistent/.cache/lockstep")


@lru_cache
def _instead_of(folder: Path, problem: str) -> Path:
    """A temporary folder that this user's processes share, so that they compile once."""
    user = os.geteuid() if hasattr(os, "geteuid") else "user"
    other = Path(tempfile.gettempdir()) / f"lockstep-{user}"
    with suppress(FileExistsError):  # a file or a dangling link is in its place
        other.mkdir(exist_ok=True, mode=0o700)
    if other.is_symlink() or not other.is_dir():
        raise UnsafeCache(
            f"{other}: is a link or a file that anyone could have created; set XDG_CACHE_HOME to a folder of your own"
        )
    warnings.warn(
        f"{folder}: cannot be used ({problem}); compiled code and measurements are kept in {other} instead, which may "
        "not last. Set XDG_CACHE_HOME to a writable folder",
        stacklevel=3,
    )
    return other


def kept_measurement(path: Path) -> Any:
    """What `keep_measurement` was given; None if there is nothing, or the file is damaged."""
    if path in _unwritten:
        return _unwritten[path]
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def keep_measurement(path: Path, measured: dict[str, Any]) -> None:
    """Writes it to a file in the cache folder; if the disk is full, it is only kept for this process."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(measured))
        partial.replace(path)
    except OSError:
        _unwritten[path] = measured
        with suppress(OSError):
            partial.unlink(missing_ok=True)


_unwritten: dict[Path, dict[str, Any]] = {}


def fingerprint(*more: str | bytes) -> str:
    """A fingerprint of the versions and the machine that compiled code belongs to, and of `more`."""
    import torch  # here: processes that tokenize import this module and nothing of PyTorch

    digest = hashlib.sha256()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    for part in (torch.__version__, platform.python_version(), platform.machine(), _cpu_flags(), device, *more):
        digest.update(part if isinstance(part, bytes) else part.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:20]


def _cpu_flags() -> str:
    """What native code depends on: a cache folder may be shared by machines with different processors."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
