"""Where compiled code is kept between processes, and what it depends on."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import torch


def cache_folder() -> Path:
    """`lockstep` in the user's cache folder (XDG_CACHE_HOME, or ~/.cache); made where it is missing."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def fingerprint(*more: str | bytes) -> str:
    """Of the versions and the machine that compiled code belongs to, and of `more`."""
    digest = hashlib.sha256()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    for part in (torch.__version__, platform.python_version(), platform.machine(), _cpu_flags(), device, *more):
        digest.update(part if isinstance(part, bytes) else part.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:20]


def _cpu_flags() -> str:
    """What code for this very processor depends on: a cache folder may be shared by machines with other processors."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
