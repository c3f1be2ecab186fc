"""`dtype = "auto"`: a folder's own; for fresh weights, the one that is measured to train faster on this processor."""

from __future__ import annotations

import math
import statistics
import time
from pathlib import Path

import torch

from lockstep import ops
from lockstep.cache import cache_folder, fingerprint, keep_measurement, kept_measurement
from lockstep.model.checkpoint import folder_dtype
from lockstep.model.dtypes import DTYPES, resolve_dtype

ROWS, FEATURES = 256, 512
"""Shape of the timed product with its gradients: that of a small model, which takes far longer than a launch."""
ROUNDS, SECONDS, CLEAR = 5, 0.3, 4.0
"""Products in each dtype: at least this many, for this long in total, or until one dtype is this many times faster."""
MARGIN = 1.1
"""bfloat16 must be this many times as fast: if it is not faster, the more exact dtype is better."""


def choose_dtype(wanted: str, model: str, device: torch.device) -> tuple[str, str]:
    """The dtype that `wanted` (a dtype, `auto` or empty) means for `model` (a folder, or fresh weights), and why.

    Nothing is measured for a GPU. Raises UserError for an unknown dtype, and for a folder in one that is not supported.
    """
    if not is_auto(wanted):
        return name_of(resolve_dtype(wanted)), ""
    if Path(model).is_dir():
        return name_of(folder_dtype(Path(model))), "the folder's own"
    if device.type != "cpu":
        return "bfloat16", "which GPUs train faster in"
    if ops.arithmetic() == "pytorch":
        return "float32", "since the plain operators widen bfloat16"
    seconds = training_seconds()
    ratio = seconds["float32"] / seconds["bfloat16"]
    if ratio >= MARGIN:
        return "bfloat16", f"{ratio:.1f} times as fast as float32 on this processor"
    faster = f"{1 / ratio:.1f} times as fast as bfloat16" if ratio * MARGIN <= 1 else "about as fast as bfloat16"
    return "float32", f"{faster} on this processor"


def is_auto(wanted: str) -> bool:
    """Whether no dtype was chosen."""
    return wanted in ("", "auto")


def name_of(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def training_seconds() -> dict[str, float]:
    """Median time of a product and its gradients on the CPU, by dtype; measured once per processor and arithmetic.

    The result stays in the cache folder, so that a run does not choose differently because the machine is busy.
    """
    of = (ops.native.build_name(), str(torch.get_num_threads()))
    path = cache_folder() / f"dtype-{fingerprint('dtype', *of)}.json"
    kept = kept_measurement(path)
    try:
        known = {name: float(kept[name]) for name in DTYPES}
        if all(0 < seconds < math.inf for seconds in known.values()):
            return known
    except (ValueError, KeyError, TypeError):
        pass  # nothing is there, or a damaged file
    measured = _measure()
    keep_measurement(path, measured)
    return measured


def _measure() -> dict[str, float]:
    work = {name: _product(dtype) for name, dtype in DTYPES.items()}
    for tensors in work.values():
        _seconds(*tensors)
    seconds: dict[str, list[float]] = {name: [] for name in work}
    until = time.perf_counter() + SECONDS
    # Alternating, so that other processes slow both.
    medians = dict.fromkeys(work, 1.0)
    while len(seconds["float32"]) < ROUNDS or time.perf_counter() < until:
        for name, tensors in work.items():
            seconds[name].append(_seconds(*tensors))
        medians = {name: statistics.median(each) for name, each in seconds.items()}
        if len(seconds["float32"]) > 1 and max(medians.values()) > CLEAR * min(medians.values()):
            break
    return medians


def _product(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(n, FEATURES, generator=draw).to(dtype) for n in (ROWS, FEATURES, ROWS))
    return x.requires_grad_(), weight.requires_grad_(), grad


def _seconds(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> float:
    with torch.enable_grad():
        began = time.perf_counter()
        torch.autograd.grad(ops.linear(x, weight), (x, weight), grad)
        return time.perf_counter() - began
