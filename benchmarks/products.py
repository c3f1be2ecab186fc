"""The operators' matrix product against the library's, in one run: forward, and both gradients.

    python benchmarks/products.py [--isa avx2] [--rows 1,8,32,64,512,2048] [--dtype float32,bfloat16]

The library's side is the faster of `F.linear` (MKL or oneDNN, as torch chooses) and oneDNN's own operator where it
takes the dtype. "packed" reads cached panels and is called from a step graph, as in a decode step; up to 64 rows that
is what counts, above it the product that lays its panels out itself. GF/s are medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from lockstep import ops
from lockstep.host_memory import keep_freed_memory
from lockstep.observe.machine import processor
from lockstep.ops.linear import input_gradient, weight_gradient

# (in, out) of the 5M, the 110M and the 0.6B model.
SHAPES = [(256, 768), (768, 2048), (2048, 768), (1024, 3072), (3072, 1024)]
FEW = 64


Work = Callable[[], object]


def seconds(*works: Work) -> list[float]:
    """Medians of as many turns as fit into a fifth of a second for each, at least 5.

    All works are done in each turn, as a host's speed drifts; each twice, of which the second time counts: the first
    finds the caches as another has left them.
    """
    times: list[list[float]] = [[] for _ in works]
    until = time.perf_counter() + 0.2 * len(works)
    while len(times[0]) < 6 or time.perf_counter() < until:
        for work, own in zip(works, times):
            work()
            began = time.perf_counter()
            work()
            own.append(time.perf_counter() - began)
    return [statistics.median(own[1:]) for own in times]


def library(x: torch.Tensor, weight: torch.Tensor) -> list[Work]:
    works: list[Work] = [
        lambda: F.linear(x, weight),
        lambda: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], ""),
    ]
    try:
        works[1]()
    except RuntimeError:
        works.pop()  # oneDNN has no such product on this processor
    return works


def gradients(rows: int, x: torch.Tensor, weight: torch.Tensor) -> tuple[float, float]:
    """How many times as fast as the library: the gradient of x, and of the weight."""
    grad = torch.randn(rows, weight.shape[0]).to(x.dtype)
    theirs, of_x = seconds(lambda: grad @ weight, lambda: input_gradient(grad, weight))
    theirs_of_w, of_w = seconds(lambda: grad.T @ x, lambda: weight_gradient(grad, x))
    return theirs / of_x, theirs_of_w / of_w


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--isa", default="")
    parser.add_argument("--rows", default="1,8,32,64,512,2048")
    parser.add_argument("--dtype", default="float32,bfloat16")
    options = parser.parse_args()
    if options.isa:
        os.environ["LOCKSTEP_ISA"] = options.isa
    keep_freed_memory()  # as a run's trainer does, for both sides: else the system's clearing of pages is measured too
    print(f"{processor()}, {ops.instruction_set()}, {ops.arithmetic()} arithmetic, {torch.get_num_threads()} threads\n")
    print("| dtype | in → out | rows | library GF/s | ours | packed | ratio | gradients of x, of w |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    ratios: dict[tuple[str, bool], list[float]] = {}
    for name in options.dtype.split(","):
        dtype = getattr(torch, name)
        for inner, outer in SHAPES:
            with torch.inference_mode(False):  # panels are kept of tensors that have versions
                weight = torch.randn(outer, inner).to(dtype)
            panels = ops.PackedWeights()
            for rows in map(int, options.rows.split(",")):
                x = torch.randn(rows, inner).to(dtype)
                with panels.in_use():
                    graph = ops.StepGraph(lambda: (ops.linear(x, weight),), ops.Arena())  # noqa: B023
                *both, ours, packed = seconds(
                    *library(x, weight),
                    lambda: ops.linear(x, weight),  # noqa: B023
                    graph.replay,
                )
                theirs = min(both)
                ratio = theirs / (packed if rows <= FEW else ours)
                ratios.setdefault((name, rows <= FEW), []).append(ratio)
                speeds = [f"{2 * rows * inner * outer / t / 1e9:.0f}" for t in (theirs, ours, packed)]
                backward = "" if rows <= FEW else "{:.2f}×, {:.2f}×".format(*gradients(rows, x, weight))
                cells = [name, f"{inner} → {outer}", str(rows), *speeds, f"{ratio:.2f}×", backward]
                print("| " + " | ".join(cells) + " |", flush=True)
    print()
    for (name, few), values in ratios.items():
        kind = f"up to {FEW} rows, packed" if few else "many rows"
        print(f"{name}, {kind}: median {statistics.median(values):.2f}×, lowest {min(values):.2f}×")


if __name__ == "__main__":
    main()
