"""What row-invariance costs: our product against cuBLAS, our attention against torch's, at the same shapes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from gpu_clock import Row, bandwidth, device_seconds, peak, row, seconds

from lockstep import ops
from lockstep.ops.cuda import linear as products

# (in, out) of one layer's products: Qwen3-0.6B's and Qwen3-8B's.
LAYERS = {
    "0.6B": [(1024, 2048), (1024, 1024), (1024, 1024), (2048, 1024), (1024, 3072), (1024, 3072), (3072, 1024)],
    "8B": [(4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), (4096, 12288), (4096, 12288), (12288, 4096)],
}
# Experts, active ones, width and their width: Qwen3-30B-A3B's.
EXPERTS = (128, 8, 2048, 768)
DECODE, PREFILL = 1.15, 1.3
OUT_OF_CACHE = 256 << 20
"""Bytes of weights that are read in turn, several times the second-level cache."""


def costs() -> Iterator[Row]:
    yield row("copy bandwidth", bandwidth() / 1e12, "TB/s")
    yield row("bfloat16 product 8192^3", peak() / 1e12, "TFLOP/s")
    yield from linears()
    yield from attentions()


def linears() -> Iterator[Row]:
    for name, shapes in LAYERS.items():
        base, *others = products.HALF_TILES
        device = torch.device("cuda")
        same = sum(all(products.agrees(t, base, torch.bfloat16, device, *s) for s in set(shapes)) for t in others)
        yield row(f"tiles of the bits of the first, of {len(others)}, {name}", same, "tiles")
        for rows, goal in ((1, DECODE), (32, DECODE), (256, DECODE), (4096, PREFILL)):
            ours = theirs = 0.0
            for inner, outer in shapes:
                mine, library = product_seconds(rows, inner, outer)
                ours, theirs = ours + mine, theirs + library
            yield row(f"linear / cuBLAS, a layer of {name}, {rows} rows", ours / theirs, "x", at_most=goal)
            yield row(f"linear, a layer of {name}, {rows} rows", ours * 1e6, "us")
    mine, library = product_seconds(32, 1024, 151936)
    yield row("linear / cuBLAS, head of 0.6B, 32 rows", mine / library, "x", at_most=DECODE)


def product_seconds(rows: int, inner: int, outer: int) -> tuple[float, float]:
    """Of our product and of the library's."""
    x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    copies = min(64, max(1, OUT_OF_CACHE // (2 * inner * outer)))
    weights = [torch.randn(outer, inner, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    mine = device_seconds([lambda w=w: ops.linear(x, w) for w in weights])
    return mine, device_seconds([lambda w=w: F.linear(x, w) for w in weights])


@torch.no_grad()
def grouped() -> Iterator[Row]:
    """The products of a mixture's experts against a loop of dense ones, and against torch's grouped product."""
    experts, active, dim, inner = EXPERTS
    for tokens, goal in ((1, DECODE), (32, DECODE), (256, DECODE), (4096, PREFILL)):
        chosen = torch.rand(tokens, experts, device="cuda").argsort(-1)[:, :active]
        starts = ops.order_by_expert(chosen, experts)[0]
        for depth, outer in ((dim, inner), (inner, dim)):
            x = torch.randn(tokens * active, depth, device="cuda", dtype=torch.bfloat16)
            w = torch.randn(experts, outer, depth, device="cuda", dtype=torch.bfloat16)
            name = f"{tokens} tokens, {active} of {experts} experts {depth}->{outer}"
            ours, loop = partial(ops.grouped_linear, x, w, starts), partial(one_by_one, x, w, starts.tolist())
            mine = device_seconds([ours])
            yield row(f"grouped product, {name}", mine * 1e6, "us")
            ratio = mine / device_seconds([loop])
            yield row(f"grouped product / a loop of linear on the device, {name}", ratio, "x", at_most=1.0)
            try:
                library = device_seconds([partial(F.grouped_mm, x, w.mT, offs=starts[1:].int())])
            except Exception as error:  # a torch or a GPU without one is a result, too
                yield {"name": f"torch's grouped product, {name}", "error": f"{type(error).__name__}: {error}"}
                continue
            yield row(f"grouped product / torch's, {name}", mine / library, "x", at_most=goal)


def one_by_one(x: torch.Tensor, w: torch.Tensor, bounds: list[int]) -> torch.Tensor:
    """Each group's dense product; `bounds` are on the CPU, which in a model would be waited for."""
    out = x.new_empty(len(x), w.shape[1])
    for group, (first, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if stop > first:
            out[first:stop] = ops.linear(x[first:stop], w[group])
    return out


@torch.no_grad()
def attentions() -> Iterator[Row]:
    heads, kv_heads, dim = 16, 8, 128
    for batch, context in ((1, 1024), (32, 512), (32, 2048), (256, 512)):
        yield from decode_attention(batch, context, heads, kv_heads, dim)
    yield from packed(8, 1024, heads, kv_heads, dim)


def decode_attention(batch: int, context: int, heads: int, kv_heads: int, dim: int) -> Iterator[Row]:
    pages = context // ops.PAGE
    cache = ops.KVCache(1, batch * pages, kv_heads, dim, torch.bfloat16, "cuda")
    cache.keys.normal_()
    cache.values.normal_()
    table = torch.randperm(batch * pages, device="cuda").view(batch, pages).int()
    contexts = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    q = torch.randn(batch, heads, dim, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, batch, kv_heads, dim, device="cuda", dtype=torch.bfloat16)
    attention = ops.PagedAttention(cache, table, None, contexts)
    mine = device_seconds([lambda: attention(0, q, k, v)], rounds=20)
    dense = torch.randn(2, batch, kv_heads, context, dim, device="cuda", dtype=torch.bfloat16)
    query = q[:, :, None]
    library = device_seconds(
        [lambda: F.scaled_dot_product_attention(query, dense[0], dense[1], enable_gqa=True)], rounds=20
    )
    shape = f"{batch} sequences of {context}"
    yield row(f"attention / torch's, decode, {shape}", mine / library, "x", at_most=DECODE)
    yield row(f"attention, decode, {shape}: share of bandwidth", dense.nbytes / mine / bandwidth(), "")


def packed(count: int, length: int, heads: int, kv_heads: int, dim: int) -> Iterator[Row]:
    """Whole sequences: prefill, and training with its backward."""
    tokens = count * length
    q = torch.randn(tokens, heads, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(tokens, kv_heads, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "kv")
    attention = ops.PackedAttention([length] * count, "cuda")

    def library() -> torch.Tensor:
        q_, k_, v_ = (x.view(count, length, -1, dim).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q_, k_, v_, is_causal=True, enable_gqa=True)

    with torch.no_grad():
        mine, theirs = device_seconds([lambda: attention(0, q, k, v)]), device_seconds([library])
    yield row(f"attention / torch's, prefill, {count} x {length}", mine / theirs, "x", at_most=PREFILL)
    grad = torch.randn(tokens, heads, dim, device="cuda", dtype=torch.bfloat16)
    with torch.enable_grad():
        mine = seconds(lambda: attention(0, q, k, v).backward(grad))
        grad = grad.view(count, length, heads, dim).transpose(1, 2)
        theirs = seconds(lambda: library().backward(grad))
    yield row(
        f"attention / torch's, training with its launches, {count} x {length}", mine / theirs, "x", at_most=PREFILL
    )
