"""Capture of CUDA graphs: a function of static buffers is recorded once, and its launches replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensors = tuple[Any, ...]
"""The results of a graph; None in place of values that are the keys."""
Replay = Callable[[], Tensors]
Capture = Callable[[Callable[[], Tensors]], Replay]
"""Captures a function of static buffers; the result replays it and returns the same tensors."""


class CudaCapture:
    """Captures with CUDA. Graphs that it captures share their memory: no two may run at the same time."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], Tensors]) -> Replay:
        # The replay writes the same values into the same pages again.
        self.warm_up(function)
        return self.record(function)

    def warm_up(self, function: Callable[[], Tensors]) -> Tensors:
        """Runs it on a stream of its own, outside of any graph: kernels are compiled, tiles tuned, counters
        allocated."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            results = function()
        torch.cuda.current_stream().wait_stream(stream)
        return results

    def record(self, function: Callable[[], Tensors]) -> Replay:
        """Records it without running it."""
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            results = function()

        def replay() -> Tensors:
            graph.replay()
            return results

        return replay
