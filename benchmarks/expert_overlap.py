"""The shared expert beside the all-to-all of tokens, against one after the other.

A mixture as wide as `deepseek_v3:small`'s on two ranks over gloo, one thread each: forward and backward of one layer,
in turn with the shared expert within `experts_over_ranks`, where rows travel meanwhile, and after it. Same bits.

Run: python benchmarks/expert_overlap.py [--tokens 512] [--rounds 40]
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from lockstep import ops
from lockstep.ops.experts import feed_forward
from lockstep.parallel.experts import experts_over_ranks

RANKS, DIM, INNER, COUNT, ACTIVE = 2, 512, 256, 16, 4
DTYPES = (torch.float32, torch.bfloat16)


def gated(weights: list[Tensor], x: Tensor) -> Tensor:
    gate, up, down = weights
    return ops.linear(ops.silu_mul(ops.linear(x, gate), ops.linear(x, up)), down)


def grouped(weights: list[Tensor], rows: Tensor, starts: Tensor) -> Tensor:
    gate, up, down = weights
    return feed_forward(rows, starts, gate, up, down)


def drawn(draw: torch.Generator, dtype: torch.dtype, *count: int) -> list[Tensor]:
    shapes = [(INNER, DIM), (INNER, DIM), (DIM, INNER)]
    return [torch.randn(*count, *s, generator=draw).mul(0.02).to(dtype).requires_grad_() for s in shapes]


def measure(rank: int, port: int, tokens: int, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    group, draw = dist.group.WORLD, torch.Generator().manual_seed(rank)
    for dtype in DTYPES:
        own, shared = drawn(draw, dtype, COUNT // RANKS), partial(gated, drawn(draw, dtype))
        x = torch.randn(tokens, DIM, generator=draw).to(dtype).requires_grad_()
        weights, chosen = torch.rand(tokens, COUNT, generator=draw).topk(ACTIVE)

        def layer(beside: bool, x: Tensor = x, weights: Tensor = weights, chosen: Tensor = chosen) -> Tensor:
            through = partial(experts_over_ranks, x, weights, chosen, COUNT, group, partial(grouped, own))  # noqa: B023
            out: Tensor = through(shared) if beside else through() + shared(x)  # noqa: B023
            out.sum().backward()
            return out

        assert torch.equal(layer(True), layer(False))
        clocks = {"elapsed": time.perf_counter, "of the processor, with gloo's threads,": time.process_time}
        taken: dict[tuple[str, bool], list[float]] = {(name, side): [] for name in clocks for side in (True, False)}
        for number in range(2 * rounds):
            dist.barrier()
            began = {name: read() for name, read in clocks.items()}
            layer(number % 2 == 0)
            for name, read in clocks.items():
                taken[name, number % 2 == 0].append(1e3 * (read() - began[name]))
        for name in clocks if rank == 0 else ():
            for find in (statistics.median, min):
                beside, after = find(taken[name, True]), find(taken[name, False])
                print(
                    f"{dtype}, {tokens} tokens, ms {name} {find.__name__} of {rounds}: beside {beside:.2f}, after "
                    f"{after:.2f}, ratio {beside / after:.3f}",
                    flush=True,
                )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--port", type=int, default=29531)
    options = parser.parse_args()
    multiprocessing.spawn(measure, (options.port, options.tokens, options.rounds), RANKS)


if __name__ == "__main__":
    main()
