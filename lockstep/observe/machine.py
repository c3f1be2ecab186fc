"""A machine's hardware, as the system reports it, and its speed, measured in about a second each."""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lockstep import ops

INSTRUCTIONS = (
    "avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve", "sve2",
)  # fmt: skip
"""Instruction sets that affect how fast a model runs, as the kernel names them."""
SECONDS = 0.5
"""Seconds per measurement, unless a single round takes longer."""
ROWS, FEATURES = 256, 1024
"""The size of the product that is timed."""
COPIED = 1 << 25
"""float32 elements that are copied: 128 MiB, beyond any processor's cache."""


def busy_neighbours() -> int:
    """The number of other runnable processes, as Linux counts them; 0 on other systems."""
    counts = []
    for _ in range(9):
        try:
            running = Path("/proc/loadavg").read_text().split()[3].partition("/")[0]
        except OSError:
            return 0
        counts.append(int(running) - 1)
        time.sleep(0.01)
    return max(0, statistics.median_low(counts))


def processor() -> str:
    """The processor's name."""
    names = [value for key, value in _cpuinfo() if key in ("model name", "Model", "Hardware")]
    return names[0] if names else platform.processor() or platform.machine()


def instructions() -> list[str]:
    """The instruction sets of INSTRUCTIONS that the processor has."""
    flags = next((value.split() for key, value in _cpuinfo() if key in ("flags", "Features")), [])
    return [name for name in INSTRUCTIONS if name in flags]


def usable_cpus() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> tuple[int, int]:
    """Total and free memory of this machine or container; zeros if unknown."""
    fields = _fields("/proc/meminfo")
    total, free = (int(fields.get(name, "0 kB").split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return total, free
    return min(total, limit), min(free, max(limit - used, 0))


def driver_version() -> str:
    """The version of NVIDIA's driver; empty if there is none."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        words = []
    if versions := [w for w in words if w[0].isdigit() and w.count(".") >= 1]:
        return versions[0]
    if not (program := shutil.which("nvidia-smi")):
        return ""
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.split("\n")[0].strip() if result.returncode == 0 else ""


def product_flops(dtype: torch.dtype) -> float:
    """FLOP/s of `ops.linear` on the CPU, the best of several measurements."""
    draw = torch.Generator().manual_seed(0)
    features = FEATURES if ops.arithmetic() != "pytorch" else 64
    x, weight = (torch.randn(n, features, generator=draw).to(dtype) for n in (ROWS, features))
    with torch.inference_mode():
        return 2 * ROWS * features**2 / _best(lambda: ops.linear(x, weight))


def copied_bytes() -> float:
    """Bytes per second read and written when copying memory, the best of several measurements."""
    source, target = torch.zeros(COPIED), torch.zeros(COPIED)
    return 2 * source.nbytes / _best(lambda: target.copy_(source))


def _best(work: Callable[[], object]) -> float:
    work()
    best, until = float("inf"), time.perf_counter() + SECONDS
    while best == float("inf") or time.perf_counter() < until:
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best


def _cpuinfo() -> list[tuple[str, str]]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return [(key.strip(), value.strip()) for key, _, value in (line.partition(":") for line in lines)]


def _fields(path: str) -> dict[str, str]:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return {}
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
