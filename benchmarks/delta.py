"""The delta rule's kernels: prefill, decode and gradients, against transformers and against chunks without causality.

    product   a float32 product of the library's own kernels: the rate that the others are measured by
    prefill   8,192 tokens: ours; the same kernels with chunks that are not causal row by row; transformers'
    decode    16 sequences and 1, early and late in a chunk
    train     2,048 tokens, forward and gradients: ours, transformers'

Heads and their sizes are those of Qwen3.5's layers. Seconds are of processor time, the best of a few, on one thread.

Run: OMP_NUM_THREADS=1 python benchmarks/delta.py [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep import ops
from lockstep.ops import native
from lockstep.ops.delta import delta
from lockstep.ops.delta_cache import paged_delta
from lockstep.ops.delta_reference import CHUNK, DeltaTerms
from lockstep.ops.native import compiling
from lockstep.ops.native.instruction_sets import supported

HEADS, DIM, WIDTH = 16, 128, 4
PREFILL, TRAIN, SEQUENCES = 8192, 2048, 16


def seconds(run: Callable[[], object], times: int = 3) -> float:
    found = []
    for _ in range(times):
        began = time.process_time()
        run()
        found.append(time.process_time() - began)
    return min(found)


def inputs(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, DeltaTerms]:
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randn(tokens, size, generator=draw).to(dtype) for size in (3 * HEADS * DIM, HEADS, HEADS)]
    weights = [torch.randn(3 * HEADS * DIM, WIDTH, generator=draw), *torch.randn(2, HEADS, generator=draw)]
    return rows[0], rows[1], rows[2], DeltaTerms(*(x.to(dtype) for x in weights), HEADS, DIM)  # type: ignore[arg-type]


def starts(tokens: int) -> Tensor:
    return torch.tensor([0, tokens], dtype=torch.int32)


def operations(tokens: int) -> float:
    """Those of a causal chunk's products, two per multiply-add."""
    of_state, of_pairs = 3 * CHUNK * DIM * DIM, 4 * CHUNK * (CHUNK + 1) / 2 * DIM
    return 2.0 * tokens / CHUNK * HEADS * (of_state + of_pairs)


def free_chunks(folder: str) -> ctypes.CDLL:
    """The kernels of `free_chunk.cpp`."""
    target, source = Path(folder) / "free.so", Path(__file__).with_name("free_chunk.cpp")
    flags = [*compiling.FLAGS, *next(each for each in supported() if each.name == native.instruction_set()).flags]
    compiler = compiling.find_compiler()
    assert compiler, "needs a C++ compiler"
    subprocess.run([compiler, *flags, f"-I{compiling.SOURCES}", "-shared", source, "-o", target], check=True)
    return ctypes.CDLL(str(target))


def theirs(mixed: Tensor, b: Tensor, a: Tensor, terms: DeltaTerms) -> Tensor:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    x = F.silu(F.conv1d(F.pad(mixed.T, (WIDTH - 1, 0))[None], terms.conv[:, None], groups=mixed.shape[1])[0].T)
    q, k, v = (each.unflatten(1, (HEADS, DIM))[None] for each in x.chunk(3, 1))
    decay = -terms.log_rates.float().exp() * F.softplus(a.float() + terms.step_bias)
    out: Tensor = torch_chunk_gated_delta_rule(q, k, v, decay[None], b.sigmoid()[None], use_qk_l2norm_in_kernel=True)[0]
    return out[0]


def report(name: str, took: float, work: float = 0.0) -> None:
    print(f"{name:40} {took * 1e3:10.2f} ms" + (f" {work / took / 1e9:8.1f} GF/s" if work else ""))


def measure_prefill(dtype: torch.dtype, folder: str) -> None:
    mixed, b, a, terms = inputs(PREFILL, dtype)
    outs, work = torch.zeros(2, PREFILL, HEADS, DIM, dtype=dtype), operations(PREFILL)
    sizes = [ctypes.c_int64(size) for size in (1, PREFILL, HEADS, HEADS, DIM, DIM, WIDTH)]
    ends, name, took = starts(PREFILL), "delta" + native.SUFFIX[dtype], list[float]()
    for kernel, out in zip((native.function(name), getattr(free_chunks(folder), name)), outs):
        pointers = [ctypes.c_void_p(x.data_ptr()) for x in (mixed, b, a, *terms[:3], out, ends)]
        pointers.insert(-1, ctypes.c_void_p(None))
        took.append(seconds(lambda: kernel(*pointers, *sizes)))  # noqa: B023
    ours, free = outs.float()
    assert (ours - free).abs().max() <= 1e-2 * ours.abs().max(), "the free chunks compute something else"
    report("prefill", took[0], work)
    report("prefill, chunks without row causality", took[1], work)
    print(f"{'price of row causality':40} {took[0] / took[1]:10.2f} x")
    report("prefill, transformers", seconds(lambda: theirs(mixed, b, a, terms), 1), work)


def measure_decode(dtype: torch.dtype) -> None:
    mixed, b, a, terms = inputs(SEQUENCES, dtype)
    cache = ops.DeltaCache(ops.DeltaSizes(1, HEADS, HEADS, DIM, DIM, WIDTH), 2 * SEQUENCES, SEQUENCES, dtype)
    places = torch.arange(SEQUENCES, dtype=torch.int32)
    step = ops.DeltaStep(cache, places, places, places + SEQUENCES)
    for count in (SEQUENCES, 1):
        ends = torch.arange(count + 1, dtype=torch.int32)
        for row in (0, 31, 62):
            contexts = torch.full((count,), 9 * CHUNK + row + 1, dtype=torch.int32)
            rows = (mixed[:count], b[:count], a[:count])
            took = seconds(lambda: paged_delta(*rows, terms, 0, step, ends, contexts), 30)  # noqa: B023
            report(f"decode of {count}, row {row} of a chunk", took)


def measure_training(dtype: torch.dtype) -> None:
    mixed, b, a, terms = inputs(TRAIN, dtype)
    leaves = [x.requires_grad_() for x in (mixed, b, a, *terms[:3])]
    with torch.enable_grad():
        for name, run in (("", lambda: delta(mixed, b, a, terms, starts(TRAIN))),
                          (", transformers", lambda: theirs(mixed, b, a, terms))):  # fmt: skip
            took = seconds(lambda: torch.autograd.grad(run().float().sum(), leaves), 2)  # noqa: B023
            report("forward and gradients" + name, took)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    dtype = getattr(torch, parser.parse_args().dtype)
    print(f"{native.instruction_set()}, {torch.get_num_threads()} threads, {dtype}")
    x, weight = torch.randn(1024, 1024), torch.randn(1024, 1024)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        report("product of 1,024 x 1,024 x 1,024", seconds(lambda: ops.linear(x, weight), 10), 2.0 * 1024**3)
        measure_prefill(dtype, folder)
        measure_decode(dtype)
        measure_training(dtype)


if __name__ == "__main__":
    main()
