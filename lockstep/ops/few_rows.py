"""A faster product for the few rows of a decode step, with the very bits of the library's product.

oneDNN's bfloat16 product sums each element in chains along K. The compiled form (`native/product.cpp`) repeats those
chains while it streams the weight from memory as it lies, so there is no packed copy to keep or to renew after an
update. How long the chains are is found by comparison, once for each shape; where no length gives equal bits, the
library's product serves.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lockstep.ops import native

FEW_ROWS = 64
"""Above it the library's product is as fast."""

PANEL_PAIRS = 128
# Lengths, in pairs along K, that are tried; 0 stands for a single chain.
CHAINS = (0, 2 * PANEL_PAIRS, 4 * PANEL_PAIRS, PANEL_PAIRS, 8 * PANEL_PAIRS)
PROBE_ROWS, PROBE_OUTPUTS = 64, 4096


def few_rows_product(x: Float[Tensor, "rows in"], weight: Float[Tensor, "out in"]) -> Float[Tensor, "rows out"] | None:
    """`x @ weight.T` for at most FEW_ROWS rows, no padding needed; None where the library's product has to serve."""
    if x.shape[0] > FEW_ROWS or x.dtype != torch.bfloat16 or not native.usable(x) or native.is_pretending():
        return None
    chain = chain_length(weight.shape[1], weight.shape[0])
    return None if chain is None else _product(x, weight, chain)


@cache
def chain_length(in_features: int, out_features: int) -> int | None:
    """Pairs of K that the library sums in one chain, or None if that was not found for this shape."""
    if in_features % 32 or native.function("has_few_rows_product")() == 0:
        return None
    with torch.inference_mode():
        # Few outputs alone might agree by chance; many alone might take another path through the library.
        samples = [_sample(in_features, n) for n in {PROBE_OUTPUTS, min(out_features, PROBE_OUTPUTS)}]
        for chain in (c or in_features // 2 for c in CHAINS):
            if all(torch.equal(_product(x, weight, chain), expected) for x, weight, expected in samples):
                return chain
    return None


def _sample(in_features: int, out_features: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(in_features)
    x = torch.randn(PROBE_ROWS, in_features, generator=generator).bfloat16()
    weight = torch.randn(out_features, in_features, generator=generator).bfloat16()
    return x, weight, F.linear(x, weight)


def _product(x: Tensor, weight: Tensor, chain: int) -> Tensor:
    x, weight = x.contiguous(), weight.contiguous()
    out = x.new_empty(x.shape[0], weight.shape[0])
    native.call("few_rows_product", x.dtype, x, weight, out, *x.shape, weight.shape[0], chain)
    return out
