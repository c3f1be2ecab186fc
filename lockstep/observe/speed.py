"""How fast a run trains, relative to what its device can do, and how much memory it uses."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from lockstep import ops
from lockstep.cache import cache_folder, cache_measurement, cached_measurement, fingerprint
from lockstep.model import ModelConfig
from lockstep.observe.machine import busy_neighbours

NVIDIA_PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "GH200": 990e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
}
"""bfloat16 FLOP/s with dense matrices, by a part of the device's name; the first match counts.
From NVIDIA's data sheets, which state twice as much for sparse matrices."""

PRODUCTS = (256, 1024, 2048)
"""Sizes of the square products that a peak is measured with: each only if the previous one took little time."""
MEASURED_SECONDS = 0.1


def training_flops(config: ModelConfig, lengths: Iterable[int]) -> int:
    """FLOPs to train on sequences of these lengths, without recomputation.

    Each weight of a matrix product costs 2 FLOPs per token forward and 4 backward, or 2 backward if an adapter is
    trained instead; the adapter's FLOPs, about a hundredth, are not counted. Causal attention adds its two products
    over the pairs that are not masked (arXiv 2204.02311, appendix B, which counts all pairs). Linear attention adds,
    per token and head, three products with the state: what it has for the key, its update, and the output.
    """
    lengths = list(lengths)
    embedding = 0 if config.tie_embeddings else config.vocab_size * config.dim
    layers = [layer for layer in range(config.num_layers) if not config.is_delta(layer)]
    pairs = sum(_pairs(n, config.window(layer)) for layer in layers for n in lengths)
    attention = 12 * config.num_heads * config.head_dim * pairs
    if config.delta is not None:
        attention += 18 * config.num_delta * config.delta.values * config.delta.key_dim * sum(lengths)
    each = 6 if config.lora is None else 4
    return each * (config.num_active_parameters - embedding) * sum(lengths) + attention


def _pairs(length: int, window: int) -> int:
    """Pairs of queries and the keys they attend to; window 0: no sliding window."""
    span = min(length, window or length)
    return span * (span + 1) // 2 + (length - span) * span


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Peak FLOP/s of one rank: from the table for a known NVIDIA device and bfloat16, else measured.

    It is measured with a matrix product, only while no other process is runnable; the best measurement is stored in the
    cache folder, for this machine and this number of threads. 0 if the machine was always busy.
    """
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for part, peak in NVIDIA_PEAKS.items():
            if part in name:
                return peak
    path = (
        cache_folder()
        / f"peak-{fingerprint(device.type, str(dtype), str(torch.get_num_threads()), ops.native.build_name())}.json"
    )
    before = _kept(path)
    if device.type == "cpu" and busy_neighbours() > 0:
        return before
    measured = _measure(device, dtype)
    if measured <= before:
        return before
    cache_measurement(path, {"flops": measured, "dtype": str(dtype), "threads": torch.get_num_threads()})
    return measured


def _kept(path: Path) -> float:
    """The best measurement so far; 0 if there is none, or the file is damaged."""
    try:
        flops = float(cached_measurement(path)["flops"])
    except (ValueError, KeyError, TypeError):
        return 0.0
    return flops if 0 < flops < math.inf else 0.0


def memory_gib(device: torch.device) -> float:
    """Peak memory of this process so far: the device's memory, or the machine's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


@torch.inference_mode()
def _measure(device: torch.device, dtype: torch.dtype) -> float:
    draw = torch.Generator().manual_seed(0)
    flops = 0.0
    for size in PRODUCTS:
        square = torch.randn(size, size, generator=draw).to(device, dtype)
        best, until = float("inf"), time.perf_counter() + MEASURED_SECONDS / len(PRODUCTS)
        # At least twice, also on a slow machine: the first round warms up.
        rounds = 0
        while rounds < 2 or time.perf_counter() < until:
            began = time.perf_counter()
            if device.type == "cuda":
                square @ square
                torch.cuda.synchronize(device)
            else:
                ops.linear(square, square)
            best = min(best, time.perf_counter() - began)
            rounds += 1
        flops = max(flops, 2 * size**3 / best)
        if best > MEASURED_SECONDS / 20:
            break
    return flops
