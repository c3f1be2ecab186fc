"""Products in low precision on one GPU against bfloat16, at the shapes of Llama 3 8B: training and decode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from gpu_clock import Row, device_seconds, row, seconds
from gpu_kernels import OUT_OF_CACHE
from torch import Tensor

from lockstep import ops
from lockstep.ops.cuda import scaled_products

SHAPES = {"q and o": (4096, 4096), "gate and up": (4096, 14336), "down": (14336, 4096)}
TOKENS = 8192
TRAINED = {"tensorwise": "float8", "rowwise": "float8_rowwise", "mxfp8_rceil": "mxfp8"}
DECODED = "int8", "int4", "int4_128"


def training() -> Iterator[Row]:
    """Forward and both gradients of a product: rounding included, as in a step."""
    for kind, format in TRAINED.items():
        for name, (inner, outer) in SHAPES.items():
            x = torch.randn(TOKENS, inner, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            w = torch.randn(outer, inner, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            grad = torch.randn(TOKENS, outer, device="cuda", dtype=torch.bfloat16)
            title = f"training, {name} of 8B, {TOKENS} rows"
            if not scaled_products.usable(x, w, kind, 1):
                yield {"name": f"{format}, {title}", "error": "this GPU or its library lacks it: emulated"}
                continue
            batches = scaled_products.batches(kind, x.device, outer, inner)
            yield row(f"{format}, {name}: fewest rows in a batch", batches[0], "rows")
            ours = seconds(partial(step, partial(ops.formatted_linear, format=format), x, w, grad))
            theirs = seconds(partial(step, ops.linear, x, w, grad))
            yield row(f"bfloat16 / {format}, {title}", theirs / ours, "x")


def step(linear: Callable[..., Tensor], x: Tensor, w: Tensor, grad: Tensor) -> None:
    linear(x, w).backward(grad)


@torch.no_grad()
def decode() -> Iterator[Row]:
    """A product with cached integers, alone on the device."""
    inner, outer = SHAPES["gate and up"]
    copies = max(1, OUT_OF_CACHE // (inner * outer // 2))
    weights = [torch.randn(outer, inner, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    for rows in (1, 32, 256):
        x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
        theirs = device_seconds([partial(ops.linear, x, w) for w in weights])
        for format in DECODED:
            with ops.PackedWeights().in_use():
                ours = device_seconds([partial(ops.formatted_linear, x, w, format) for w in weights])
            yield row(f"bfloat16 / {format}, decode, gate and up of 8B, {rows} rows", theirs / ours, "x")


def costs() -> Iterator[Row]:
    yield from decode()
    yield from training()
