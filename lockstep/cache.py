"""The cache folder for compiled code and measurements, and the fingerprint of what they depend on."""

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
    """Other users could put code that this process runs into the cache folder; the message says what to do."""


def cache_folder() -> Path:
    """`lockstep` in the user's cache folder (XDG_CACHE_HOME, or ~/.cache); created for its owner only if missing.

    If it is not writable, a private temporary folder, with a warning. Raises UnsafeCache for a folder of another user,
    or one that others can write to.
    """
    folder = _default_folder()
    try:
        _make(folder)
        problem = "" if os.access(folder, os.W_OK | os.X_OK) else "no permission to write"
    except OSError as error:
        problem = error.strerror or str(error)
    else:
        require_private(folder)
    if problem:
        folder = _fallback_for(folder, problem)
        require_private(folder)
    return folder


def _make(folder: Path) -> None:
    """Creates a folder and its missing parents, accessible to their owner only."""
    if not folder.parent.is_dir():
        _make(folder.parent)
    folder.mkdir(exist_ok=True, mode=0o700)


def require_private(path: Path, elsewhere: str = "set XDG_CACHE_HOME to a folder of your own") -> None:
    """Raises UnsafeCache unless only this user can write to `path`, a folder or a file; root may own a file.

    `elsewhere`: what else the user can do about it.
    """
    if not hasattr(os, "geteuid"):
        return
    status, user = path.stat(), os.geteuid()
    owners = (user,) if stat.S_ISDIR(status.st_mode) else (user, 0)
    link = path.lstat().st_uid  # the owner of a link can change its target at any time
    if status.st_uid not in owners or link not in (user, 0):
        owner = link if status.st_uid in owners else status.st_uid
        raise UnsafeCache(
            f"{path}: belongs to user {owner}, but this process runs as user {user}; compiled code in it could "
            f"be anyone's. Give it to this user (chown -hR {user} {path}), or {elsewhere}"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnsafeCache(
            f"{path}: other users can write to it (mode {stat.S_IMODE(status.st_mode):o}), so compiled code in it "
            f"could be theirs. Delete it (rm -r {path}; it will be recreated), or {elsewhere}"
        )


def _default_folder() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"
    except RuntimeError:  # the user has no home
        return Path("/nonexistent/.cache/lockstep")


@lru_cache
def _fallback_for(folder: Path, problem: str) -> Path:
    """A temporary folder that all of this user's processes share, so that they compile once."""
    user = os.geteuid() if hasattr(os, "geteuid") else "user"
    other = Path(tempfile.gettempdir()) / f"lockstep-{user}"
    with suppress(FileExistsError):  # a file or a dangling link is in its place
        other.mkdir(exist_ok=True, mode=0o700)
    if other.is_symlink() or not other.is_dir():
        raise UnsafeCache(
            f"{other}: is a link or a file that anyone could have created; set XDG_CACHE_HOME to a folder of your own"
        )
    warnings.warn(
        f"{folder}: cannot be used ({problem}); compiled code and measurements are cached in {other} instead, which "
        "may not persist. Set XDG_CACHE_HOME to a writable folder",
        stacklevel=3,
    )
    return other


def cached_measurement(path: Path) -> Any:
    """The value stored by `cache_measurement`; None if there is none, or the file is damaged."""
    if path in _unwritten:
        return _unwritten[path]
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def cache_measurement(path: Path, measured: dict[str, Any]) -> None:
    """Stores a measurement in a file of the cache folder, or in this process if the disk is full."""
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
    """A hash of the versions and the machine that compiled code depends on, and of `more`."""
    import torch  # imported here: processes that only tokenize import this module without PyTorch

    digest = hashlib.sha256()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    for part in (torch.__version__, platform.python_version(), platform.machine(), _cpu_flags(), device, *more):
        digest.update(part if isinstance(part, bytes) else part.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:20]


def _cpu_flags() -> str:
    """The processor's features: machines with different processors may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
