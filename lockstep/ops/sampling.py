"""Drawing the next token of each row, with the log-probability that the trainer will compute for it."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lockstep.ops import cuda, native
from lockstep.ops.elementary import exponential
from lockstep.ops.logprobs import logits_log_probs, piece_bounds
from lockstep.ops.temperature import inverse_temperature


def sample(
    logits: Float[Tensor, "rows vocab"],
    temperature: Float[Tensor, "rows"],
    top_k: Int[Tensor, "rows"],
    top_p: Float[Tensor, "rows"],
    min_p: Float[Tensor, "rows"],
    uniform: Float[Tensor, "rows"],
) -> tuple[Int[Tensor, "rows"], Float[Tensor, "rows"]]:
    """One token a row, by inverse transform of `uniform` in [0, 1), and its log-probability (float32).

    temperature 0 takes the likeliest token, its log-probability then at temperature 1. top_k 0, top_p 1 and min_p 0
    switch a cut off; top_p counts from the tokens that top_k leaves. Cuts apply to the draw alone: the log-probability
    is over the whole vocabulary. It is NaN or infinite where a logit is NaN or +inf, or all are -inf.
    """
    greedy = temperature == 0
    inverse = inverse_temperature(temperature)
    allowed = logits
    cut = ~greedy & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    if cut.any():
        allowed = _cut(logits, inverse, cut, top_k, top_p, min_p)
    tokens = _draw(allowed.contiguous(), inverse, torch.where(greedy, -1.0, uniform))
    return tokens, logits_log_probs(logits, tokens, inverse)[0]


def draw(
    logits: Float[Tensor, "rows vocab"], temperature: Float[Tensor, "rows"], uniform: Float[Tensor, "rows"]
) -> tuple[Int[Tensor, "rows"], Float[Tensor, "rows"]]:
    """`sample` without cuts. Nothing in it waits for the device: a CUDA graph can record it."""
    inverse = inverse_temperature(temperature)
    tokens = _draw(logits.contiguous(), inverse, torch.where(temperature == 0, -1.0, uniform))
    return tokens, logits_log_probs(logits, tokens, inverse)[0]


def top_log_probs(
    logits: Float[Tensor, "rows vocab"], temperature: Float[Tensor, "rows"], counts: list[int]
) -> list[list[tuple[int, float]]]:
    """Of each row, the `counts[row]` likeliest tokens with their log-probabilities, best first."""
    inverse = inverse_temperature(temperature)
    result: list[list[tuple[int, float]]] = [[] for _ in counts]
    rows = [row for row, count in enumerate(counts) if count]
    asked = logits[rows]
    normalizers = logits_log_probs(asked, asked.new_zeros(len(rows), dtype=torch.int64), inverse[rows])[2]
    for own, normalizer, row in zip(asked, normalizers, rows):
        likeliest = own.topk(min(counts[row], logits.shape[1])).indices
        log_probs = own[likeliest].float() * inverse[row] - normalizer
        result[row] = list(zip(likeliest.tolist(), log_probs.tolist()))
    return result


def _cut(logits: Tensor, inverse: Tensor, cut: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """`logits` with -inf for every token that the row's cuts leave out; rows without a cut are untouched."""
    if native.usable(logits):
        logits, allowed = logits.contiguous(), torch.empty_like(logits, memory_format=torch.contiguous_format)
        shares = top_p.double(), min_p.double()
        native.call("cut", logits.dtype, logits, allowed, inverse, cut, top_k, *shares, *logits.shape)
        return allowed
    return _cut_by_sorting(logits, inverse, cut, top_k, top_p, min_p)


def _cut_by_sorting(
    logits: Tensor, inverse: Tensor, cut: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    rows = cut.nonzero()[:, 0]
    ordered, order = (logits[rows].float() * inverse[rows, None]).sort(dim=-1, descending=True, stable=True)
    # Sums in float64 and along one row: neither the row's neighbours nor their number matter.
    weights = _weights(ordered.double() - ordered[:, :1].double())
    sums = weights.cumsum(-1)
    before = sums - weights
    rank = torch.arange(logits.shape[1], device=logits.device)
    limit = torch.where(top_k[rows] > 0, top_k[rows], logits.shape[1])
    kept = sums.gather(1, (limit[:, None] - 1).clamp(max=logits.shape[1] - 1))
    share = top_p[rows, None]
    out = (rank >= limit[:, None]) | ((share < 1) & (before >= share * kept))
    out |= weights < min_p[rows, None] * weights[:, :1]
    out[:, 0] = False
    allowed = logits.clone()
    allowed[rows] = allowed[rows].masked_fill(torch.zeros_like(out).scatter(1, order, out), float("-inf"))
    return allowed


def _weights(x: Tensor) -> Tensor:
    return torch.from_numpy(exponential(x.numpy())) if x.device.type == "cpu" else x.exp()


def _draw(logits: Tensor, inverse: Tensor, uniform: Tensor) -> Tensor:
    if cuda.usable(logits):
        from lockstep.ops.cuda import vocabulary

        return vocabulary.draw(logits, inverse, uniform)
    if native.usable(logits):
        tokens = torch.empty(logits.shape[0], dtype=torch.int64)
        bounds = piece_bounds(logits.shape[1])
        sizes = (*logits.shape, len(bounds) - 1)
        native.call("draw", logits.dtype, logits, inverse, uniform.contiguous(), bounds, tokens, *sizes)
        return tokens
    scaled = (logits.float() * inverse[:, None]).double()
    likeliest = scaled.argmax(-1)
    weights = torch.exp(scaled - scaled.amax(-1, keepdim=True)).cumsum(-1)
    drawn = torch.searchsorted(weights, (uniform[:, None] * weights[:, -1:]).clamp(min=0), right=True)[:, 0]
    # Rounding at the very end may pass the last token with any weight: take that one.
    last = torch.where(scaled.isinf(), -1, torch.arange(scaled.shape[1], device=logits.device)).amax(-1)
    # Of a row that is not finite, whose log-probability says so, any token will do.
    return torch.where(uniform < 0, likeliest, torch.minimum(drawn, last)).clamp(min=0)


def uniforms(seeds: Int[Tensor, "rows"], counters: Int[Tensor, "rows"]) -> Float[Tensor, "rows"]:
    """float64 in [0, 1) from (seed, counter) alone: SplitMix64 (Steele, Lea & Flood 2014) of both in turn."""
    with np.errstate(over="ignore"):
        state = _mix(seeds.cpu().numpy().astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
        state = _mix(state + counters.cpu().numpy().astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return torch.from_numpy((state >> np.uint64(11)).astype(np.float64) * 2.0**-53).to(seeds.device)


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
