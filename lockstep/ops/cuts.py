"""Top-k, top-p and min-p.

A row's tokens are sorted by descending logit, ties by ascending token id. Top-k keeps the first k; top-p the shortest
prefix whose weights reach a share of the total. Radix selection (Knuth, TAOCP 3, 5.2.5) locates the last token to keep:
for one byte of the logit's bits at a time, the sums of 256 buckets. Weights are integer multiples of 2^-40 of the
likeliest token's weight, so sums are exact in any order: the result has the same bits however many processes share the
vocabulary, and they only exchange the buckets' sums.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lockstep.ops import native, plain
from lockstep.ops.elementary import logarithm
from lockstep.ops.vocabulary import VocabularyPart

BUCKETS = 256
GROUPS = 256
"""Groups of a row's tokens; their maxima bound the last logit of a small top-k."""
UNIT = 2.0**40
"""Weights are integers in units of 1 / UNIT of the largest: sums of 2^22 weights fit in 63 bits."""


def cut(
    logits: Float[Tensor, "rows part"],
    inverse_temperature: Float[Tensor, "rows"],
    top_k: Int[Tensor, "rows"],
    top_p: Float[Tensor, "rows"],
    min_p: Float[Tensor, "rows"],
    rows: Bool[Tensor, "rows"],
    part: VocabularyPart,
) -> Float[Tensor, "rows part"]:
    """`logits` with -inf for every excluded token of `rows`; other rows, and rows that are not finite, are copied.

    Processes that share the vocabulary call it together, with the same parameters.
    """
    maxima = group_maxima(logits) * inverse_temperature[:, None]
    highest = part.gather(maxima.amax(-1)).amax(0)
    rows = rows & highest.isfinite()
    lower_bounds = torch.where(rows & (top_k > 0), lowest_of_first(maxima, top_k), -torch.inf)
    allowed = _drop_below(logits, inverse_temperature, lower_bounds)
    for wanted, by_weight in ((top_k, False), (top_p, True)):
        selected = (rows & ((wanted < 1) if by_weight else (wanted > 0))).nonzero()[:, 0]
        if len(selected):
            row = _Rows(allowed, selected, inverse_temperature[selected].contiguous(), highest[selected], by_weight)
            _keep(row, *_last_kept(row, wanted[selected], part))
    if (selected := rows & (min_p > 0)).any():
        allowed = _drop_below(allowed, inverse_temperature, torch.where(selected, highest + _log(min_p), -torch.inf))
    return allowed


def group_maxima(logits: Float[Tensor, "rows part"]) -> Float[Tensor, "rows groups"]:
    """The maxima of groups of each row's tokens: -inf for an empty group, NaN for one with a NaN."""
    maxima = logits.new_full((len(logits), GROUPS), -torch.inf, dtype=torch.float32)
    size = logits.shape[1] // (GROUPS - 1)
    if size:
        groups = logits[:, : size * (GROUPS - 1)].unflatten(1, (GROUPS - 1, size))
        maxima[:, : GROUPS - 1] = groups.amax(-1)
    if rest := logits.shape[1] - size * (GROUPS - 1):
        maxima[:, -1] = logits[:, -rest:].amax(-1)
    return maxima


def lowest_of_first(maxima: Float[Tensor, "rows groups"], counts: Int[Tensor, "rows"]) -> Float[Tensor, "rows"]:
    """A lower bound of the `counts` greatest logits of a row: that many groups have a maximum of at least this."""
    kth = maxima.sort(-1, descending=True).values.gather(1, (counts[:, None] - 1).clamp(0, GROUPS - 1))[:, 0]
    return torch.where(counts <= GROUPS, kth, -torch.inf)


def _drop_below(logits: Tensor, inverse: Tensor, lowest: Float[Tensor, "rows"]) -> Tensor:
    """A copy with -inf for the logits that, divided by the temperature, are below their row's `lowest`."""
    if native.usable(logits):
        logits, out = logits.contiguous(), torch.empty_like(logits, memory_format=torch.contiguous_format)
        native.call("drop_below", logits.dtype, logits, out, inverse.contiguous(), lowest, *logits.shape)
        return out
    return logits.masked_fill(logits.float() * inverse[:, None] < lowest[:, None], -torch.inf)


class _Rows(NamedTuple):
    """Rows `place` of `logits`, and what is summed over tokens: the number 1, or with `by_weight` the weight
    e^(x / temperature - highest)."""

    logits: Tensor
    place: Tensor
    inverse: Tensor
    highest: Tensor
    by_weight: bool


def _last_kept(rows: _Rows, wanted: Tensor, part: VocabularyPart) -> tuple[Tensor, Tensor, int]:
    """For each row, the logit of the last token to keep, how much this part's tokens with that logit may add, and
    `shift`: the logit is represented by its key without the last `shift` bits."""
    prefixes = torch.zeros_like(rows.place)
    # The lower 16 bits of a bfloat16 are zeros.
    shifts = (24, 16) if rows.logits.dtype == torch.bfloat16 else (24, 16, 8, 0)
    for shift in shifts:
        everyone = part.gather(_bucket_sums(rows, prefixes, shift))
        sums = everyone.sum(0)
        passed = sums.cumsum(-1)
        if shift == 24:
            total = passed[:, -1]
            goal = (wanted.double() * total.double()).ceil().long() if rows.by_weight else wanted
            goal = goal.clamp(min=1).minimum(total)
        bucket = (passed < goal[:, None]).sum(-1, keepdim=True)
        goal = goal - (passed - sums).gather(1, bucket)[:, 0]
        prefixes = prefixes * BUCKETS + bucket[:, 0]
    # Of equal tokens, those of earlier parts come first.
    for earlier in everyone[: part.rank]:
        goal = goal - earlier.gather(1, bucket)[:, 0]
    return prefixes, goal, shifts[-1]


def _bucket_sums(rows: _Rows, prefixes: Int[Tensor, "rows"], shift: int) -> Int[Tensor, "rows buckets"]:
    """Sums over the tokens whose keys begin with a row's prefix, by the next byte, above `shift` bits."""
    sums = torch.zeros(len(rows.place), BUCKETS, dtype=torch.int64, device=rows.logits.device)
    if native.usable(rows.logits):
        sizes = (int(rows.by_weight), shift, len(rows.place), rows.logits.shape[1])
        tensors = (rows.logits, rows.place, rows.inverse, rows.highest, prefixes, sums)
        native.call("bucket_sums", rows.logits.dtype, *tensors, *sizes)
        return sums
    keys = ordering(rows.logits[rows.place])
    inside = keys >> (shift + 8) == prefixes[:, None]
    return sums.scatter_add_(1, keys >> shift & (BUCKETS - 1), _measure(rows) * inside)


def _keep(rows: _Rows, prefixes: Int[Tensor, "rows"], remaining: Int[Tensor, "rows"], shift: int) -> None:
    """-inf for the tokens after the prefix, and for those at the prefix once they have reached `remaining`."""
    if native.usable(rows.logits):
        sizes = (int(rows.by_weight), shift, len(rows.place), rows.logits.shape[1])
        tensors = (rows.logits, rows.place, rows.inverse, rows.highest, prefixes, remaining)
        native.call("keep", rows.logits.dtype, *tensors, *sizes)
        return
    logits = rows.logits[rows.place]
    keys, measure = ordering(logits) >> shift, _measure(rows)
    tied = measure * (keys == prefixes[:, None])
    out = (keys > prefixes[:, None]) | ((tied > 0) & (tied.cumsum(-1) - tied >= remaining[:, None]))
    rows.logits[rows.place] = logits.masked_fill_(out, -torch.inf)


def _measure(rows: _Rows) -> Int[Tensor, "rows part"]:
    if not rows.by_weight:
        return rows.place.new_ones(1, 1).expand(len(rows.place), rows.logits.shape[1])
    scaled = rows.logits[rows.place].float() * rows.inverse[:, None]
    return (plain.exp(scaled - rows.highest[:, None]) * UNIT).long()


def ordering(logits: Float[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """A sort key below 2^32 for each logit: lower for greater logits, the lowest for NaN."""
    bits = (logits.float() + 0.0).view(torch.int32).long()  # -0 is 0
    return torch.where(bits < 0, bits + 2**32, bits ^ 0x7FFFFFFF)


def logits_of(ordering: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The inverse of `ordering`: the logits, in float32."""
    return torch.where(ordering < 2**31, ordering ^ 0x7FFFFFFF, ordering - 2**32).int().view(torch.float32)


def _log(x: Tensor) -> Tensor:
    return torch.from_numpy(logarithm(x.double().numpy())).float() if x.device.type == "cpu" else x.log().float()
