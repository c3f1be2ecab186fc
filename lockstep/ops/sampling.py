"""Draws each row's next token, with its log-probability as the trainer computes it, and that after truncation."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int
from torch import Tensor

from lockstep.ops import cuda, native
from lockstep.ops.cuts import UNIT, cut, group_maxima, logits_of, lowest_of_first, ordering
from lockstep.ops.logprobs import inverse_temperature, join_masses, masses
from lockstep.ops.vocabulary import VocabularyPart, Whole, local_piece_bounds, piece_bounds


def sample(
    logits: Float[Tensor, "rows part"],
    temperature: Float[Tensor, "rows"],
    top_k: Int[Tensor, "rows"],
    top_p: Float[Tensor, "rows"],
    min_p: Float[Tensor, "rows"],
    uniform: Float[Tensor, "rows"],
    part: VocabularyPart | None = None,
    adjusted: Float[Tensor, "rows part"] | None = None,
) -> tuple[Int[Tensor, "rows"], Float[Tensor, "rows"], Float[Tensor, "rows"]]:
    """One token per row, by inverse transform of `uniform` in [0, 1), with its log-probability before and after
    truncation.

    temperature 0 selects the likeliest token, with its log-probability at temperature 1. top_k 0, top_p 1 and min_p 0
    disable each; top_p applies to the tokens that remain after top_k. Truncation only affects the draw: the first
    log-probability (float32) is over the whole vocabulary, and NaN or infinite if a logit is NaN or +inf, or all are
    -inf. The second is over the remaining tokens, log p − log Σ p of those, with the bits of the first if all remain.

    adjusted: logits, of another dtype perhaps, to draw from instead: they change the second log-probability, never the
    first. At least one of a row's must be finite.

    If `logits` are those of a `part` of the vocabulary, all processes with a part call it with otherwise the same
    arguments, and all get the result of one process. They exchange sums over their parts, never logits.
    """
    part = part or Whole(logits.shape[1])
    inverse, uniform = drawing(temperature, uniform)
    cuts = (temperature != 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    allowed = adjusted
    if cuts.any():
        allowed = cut(logits if adjusted is None else adjusted, inverse, top_k, top_p, min_p, cuts, part)
    return _draw(logits, allowed, inverse, uniform, part, adjusted is not None)


def draw(
    logits: Float[Tensor, "rows vocab"], temperature: Float[Tensor, "rows"], uniform: Float[Tensor, "rows"]
) -> tuple[Int[Tensor, "rows"], Float[Tensor, "rows"]]:
    """`sample` without truncation. It does not synchronize with the device, so a CUDA graph can capture it."""
    return draw_scaled(logits, *drawing(temperature, uniform))


def drawing(
    temperature: Float[Tensor, "rows"], uniform: Float[Tensor, "rows"]
) -> tuple[Float32[Tensor, "rows"], Float64[Tensor, "rows"]]:
    """Inputs of `draw_scaled`: the logits' factor at each row's temperature, and its uniform number, -1 if greedy."""
    return inverse_temperature(temperature), torch.where(temperature == 0, -1.0, uniform.double())


def draw_scaled(
    logits: Float[Tensor, "rows vocab"], inverse: Float32[Tensor, "rows"], uniform: Float64[Tensor, "rows"]
) -> tuple[Int[Tensor, "rows"], Float[Tensor, "rows"]]:
    """`draw` from the results of `drawing`."""
    return _draw(logits, None, inverse, uniform, Whole(logits.shape[1]))[:2]


def top_log_probs(
    logits: Float[Tensor, "rows part"],
    temperature: Float[Tensor, "rows"],
    counts: list[int],
    part: VocabularyPart | None = None,
) -> list[list[tuple[int, float]]]:
    """For each row, the `counts[row]` likeliest tokens with their log-probabilities, best first.

    Of equally likely tokens, the lower id comes first. For `part`, see `sample`.
    """
    part = part or Whole(logits.shape[1])
    result: list[list[tuple[int, float]]] = [[] for _ in counts]
    rows = [row for row, count in enumerate(counts) if count]
    if not rows:
        return result
    requested, inverse = logits[rows], inverse_temperature(temperature)[rows]
    pieces = part.gather_masses(masses(requested, inverse, local_piece_bounds(part, logits.device)))
    normalizers = join_masses(pieces, inverse)[2]
    tokens, best = _likeliest(requested, min(max(counts), part.vocab), part)
    log_probs = best * inverse[:, None] - normalizers[:, None]
    for place, row in enumerate(rows):
        result[row] = list(zip(tokens[place].tolist(), log_probs[place].tolist()))[: counts[row]]
    return result


def ranked_log_probs(
    logits: Float[Tensor, "rows part"], targets: Int[Tensor, "rows"], part: VocabularyPart | None = None
) -> tuple[Float[Tensor, "rows"], Int[Tensor, "rows"]]:
    """Each row's log p(target) at temperature 1, with the bits of `token_log_probs`, and the number of tokens that are
    as likely or likelier.

    For `part`, see `sample`.
    """
    part = part or Whole(logits.shape[1])
    ones = torch.ones(len(logits), dtype=torch.float32, device=logits.device)
    pieces = part.gather_masses(masses(logits, ones, local_piece_bounds(part, logits.device)))
    places = torch.where((targets >= part.first) & (targets < part.stop), targets - part.first, -1)
    here = logits.gather(1, places[:, None].clamp(min=0))[:, 0].float() if logits.shape[1] else ones
    chosen = part.drawn(places, here)[1]
    ranks = part.gather((logits >= chosen.to(logits.dtype)[:, None]).sum(1)).sum(0)
    return join_masses(pieces, chosen)[0], ranks


def _likeliest(logits: Tensor, count: int, part: VocabularyPart) -> tuple[Tensor, Tensor]:
    """For each row, the tokens with the `count` greatest logits, and these logits in float32."""
    local = logits.new_full((len(logits), count), torch.iinfo(torch.int64).max, dtype=torch.int64)
    here = min(count, logits.shape[1])
    if here:
        counts = torch.full((len(logits),), here, device=logits.device)
        for row, lowest in enumerate(lowest_of_first(group_maxima(logits), counts)):
            places = (~(logits[row] < lowest)).nonzero()[:, 0]  # true for NaN as well
            # A unique sort key per token: by descending logit, then ascending token id.
            keys = (ordering(logits[row, places]) - 2**31 << 32) + places + part.first
            local[row, :here] = keys.topk(here, largest=False).values
    best = part.gather(local).transpose(0, 1).flatten(1).topk(count, largest=False).values
    return best & 0xFFFFFFFF, logits_of((best >> 32) + 2**31)


def _draw(
    logits: Tensor,
    allowed: Tensor | None,
    inverse: Tensor,
    uniform: Tensor,
    part: VocabularyPart,
    is_adjusted: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """A token among those `allowed`, its log-probability among all tokens, and among the allowed ones. is_adjusted:
    whether logits of the allowed ones are others than in `logits`."""
    bounds = local_piece_bounds(part, logits.device)
    pieces = masses(logits, inverse, bounds)
    if allowed is None:
        pieces = weights = part.gather_masses(pieces)
    else:
        both = part.gather_masses(torch.cat((pieces, masses(allowed, inverse, bounds))))
        pieces, weights = both[: len(logits)], both[len(logits) :]
    places, allowed_scaled = _draw_from_pieces(logits if allowed is None else allowed, inverse, uniform, weights, part)
    tokens, allowed_scaled = part.drawn(places, allowed_scaled)
    scaled = allowed_scaled
    if is_adjusted:
        here = logits.gather(1, places[:, None].clamp(min=0))[:, 0].float() if logits.shape[1] else inverse
        scaled = part.drawn(places, here * inverse)[1]
    log_probs = join_masses(pieces, scaled)[0]
    # The masses from the draw, joined like those of the whole vocabulary: in the same order in every layout.
    return tokens, log_probs, log_probs if allowed is None else join_masses(weights, allowed_scaled)[0]


def _draw_from_pieces(
    logits: Tensor, inverse: Tensor, uniform: Tensor, pieces: Tensor, part: VocabularyPart
) -> tuple[Int[Tensor, "rows"], Float32[Tensor, "rows"]]:
    """For each row, the token's place in `part`, or -1 if it is in another part, and its logit divided by the
    temperature, undefined if it is in another part. A negative `uniform` draws the likeliest token.

    `pieces` are the masses of the whole vocabulary.
    """
    bounds = piece_bounds(part.vocab, logits.device)
    bounds = bounds - part.first if part.first else bounds  # a constant, which step graphs do not recompute
    if native.usable(logits):
        inputs = logits.contiguous(), inverse.contiguous(), uniform.contiguous(), pieces.contiguous(), bounds
        tokens, scaled = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits), dtype=torch.float32)
        native.call("draw", logits.dtype, *inputs, tokens, scaled, *logits.shape, pieces.shape[1])
        return tokens, scaled
    if cuda.usable(logits):
        from lockstep.ops.cuda import vocabulary

        tokens = vocabulary.draw(logits, inverse, uniform, pieces, bounds)
    else:
        tokens = _plain_draw(logits, inverse, uniform, pieces, bounds)
    if not logits.shape[1]:
        return tokens, torch.zeros_like(inverse)
    return tokens, logits.gather(1, tokens[:, None].clamp(min=0))[:, 0].float() * inverse


def _plain_draw(logits: Tensor, inverse: Tensor, uniform: Tensor, pieces: Tensor, bounds: Tensor) -> Tensor:
    if not logits.shape[1]:
        return torch.full_like(uniform, -1, dtype=torch.int64)
    greedy, tops = (uniform < 0)[:, None], pieces[..., 0]
    highest = tops.amax(1, keepdim=True)
    # The first piece with the maximum, or whose running sum of weights exceeds uniform · total. If none does, due to
    # rounding, the last one with any weight.
    weights = pieces[..., 1].double() * torch.exp((tops - highest).double())
    sums = weights.cumsum(1)
    wanted = uniform[:, None] * sums[:, -1:]
    last = (weights > 0).cumsum(1).argmax(1, keepdim=True)
    piece = torch.where(greedy, tops != highest, sums <= wanted).cumprod(1).sum(1, keepdim=True).minimum(last)
    wanted = wanted - (sums - weights).gather(1, piece)
    first, stop = bounds[piece], bounds[piece + 1]
    # The same for the token in the piece. Sums of integer multiples of 2^-40 are exact, in any part.
    place = torch.arange(logits.shape[1], device=logits.device)
    scaled = logits.float() * inverse[:, None]
    inside = (place >= first) & (place < stop)
    weights = torch.exp((scaled - highest).double()) * inside
    heavy = (weights * UNIT).long()
    passed = torch.where(greedy, scaled == highest, (heavy.cumsum(1) > wanted * UNIT) & (heavy > 0)) & inside
    some, last = passed.any(1), torch.where(weights > 0, place, first).amax(1)
    # For a row that is not finite, as its log-probability shows, any token is valid.
    token = torch.where(some, torch.where(passed, place, logits.shape[1]).amin(1), last)
    return torch.where((first >= 0) & (stop <= logits.shape[1]), token[:, None], -1)[:, 0]


def uniforms(seeds: Int[Tensor, "rows"], counters: Int[Tensor, "rows"]) -> Float[Tensor, "rows"]:
    """float64 in [0, 1) that depends only on (seed, counter), by SplitMix64 (Steele, Lea & Flood 2014)."""
    with np.errstate(over="ignore"):
        state = _mix(seeds.cpu().numpy().astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
        state = _mix(state + counters.cpu().numpy().astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return torch.from_numpy((state >> np.uint64(11)).astype(np.float64) * 2.0**-53).to(seeds.device)


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
