"""Times on the GPU, and the limits of this one that other numbers are compared with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

Row = dict[str, Any]


def row(name: str, value: float, unit: str, at_most: float | None = None, at_least: float | None = None) -> Row:
    """A measured number, with its goal where there is one."""
    entry: Row = {"name": name, "value": float(f"{value:.4g}"), "unit": unit}
    if at_most is not None:
        entry |= {"goal": f"<= {at_most}", "met": value <= at_most}
    if at_least is not None:
        entry |= {"goal": f">= {at_least}", "met": value >= at_least}
    return entry


def seconds(function: Callable[[], Any], repeats: int = 5) -> float:
    """Median time of a call, its launches included; the first two calls are not counted."""
    times = []
    for index in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        if index >= 2:
            times.append(start.elapsed_time(end) / 1000)
    return sorted(times)[len(times) // 2]


def elapsed(function: Callable[[], Any], repeats: int = 5) -> float:
    """Mean time of a call by the host's clock, what the host does between launches included; after two calls."""
    for _ in range(2):
        function()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        function()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeats


def device_seconds(functions: Sequence[Callable[[], Any]], rounds: int = 1) -> float:
    """Time of one call on the device alone: the calls are replayed from a graph, in turn.

    Several functions over different data keep what one has read out of the cache of the next.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for function in functions:
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for function in functions:
                function()
    return seconds(graph.replay) / (rounds * len(functions))


@lru_cache(maxsize=1)
def bandwidth() -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.empty(1 << 30, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source))


@lru_cache(maxsize=1)
def peak() -> float:
    """Floating-point operations a second of a large bfloat16 product of random numbers."""
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / seconds(lambda: left @ right, repeats=10)
