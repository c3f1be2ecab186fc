"""Sequences side by side in one packed row, and which of its positions predict which token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lockstep import ops
from lockstep.config.parallel import ROW_MULTIPLE
from lockstep.data import Row
from lockstep.model import ScoringModel


@dataclass
class PackedRow:
    """Whole sequences, one after the other, as `Decoder.forward` takes them."""

    tokens: Int[Tensor, "tokens"]
    positions: Int[Tensor, "tokens"]
    lengths: list[int]
    predictors: Int[Tensor, "targets"]
    """Rows whose next token is scored."""
    targets: Int[Tensor, "targets"]
    """That next token."""
    counts: Int[Tensor, "tokens"]
    """How many of the sequences' tokens each row stands for: 0 of padding, several of a start that sequences share."""
    attention: ops.Attention | None = None
    """How its tokens attend; None: each to its own sequence up to itself, all of which is here."""
    left_out: list[int] | None = None
    """Of each sequence's `lengths` tokens, how many first ones are not here but in the last sequence before it that has
    all of its own; None: all are here."""

    def attend(self) -> ops.Attention:
        """How its tokens attend: `attention`, or what its sequences say. It tells the model what each row counts as."""
        attention: Any = self.attention
        if attention is None and self.left_out and any(self.left_out):
            attention = ops.SharedPrefixAttention(self.lengths, self.left_out, self.tokens.device)
        elif attention is None:
            attention = ops.PackedAttention(self.lengths, self.tokens.device)
        attention.row_counts = self.counts
        return attention  # type: ignore[no-any-return]

    def idle(self) -> PackedRow:
        """The same row for a rank that has nothing left to compute where others do: it counts for nothing."""
        return replace(self, counts=torch.zeros_like(self.counts))


def pack(
    sequences: Sequence[Sequence[int]],
    first_targets: Sequence[int] | None = None,
    device: str | torch.device = "cpu",
) -> PackedRow:
    """Packs `sequences`; of each, the tokens from index `first_targets` on (default 1: all but the first) are targets.

    Raises ValueError for an empty sequence or a first target below 1: nothing comes before token 0.
    """
    firsts = [1] * len(sequences) if first_targets is None else list(first_targets)
    lengths = [len(s) for s in sequences]
    if not all(lengths) or not all(f >= 1 for f in firsts):
        raise ValueError(f"cannot pack sequences of {lengths} tokens with first targets {firsts}")
    total = sum(lengths)
    # The ranks of a tensor degree share the rows evenly; attention ignores the padding.
    padding = -total % ROW_MULTIPLE
    tokens = torch.tensor([t for s in sequences for t in s] + [0] * padding, dtype=torch.int64)
    positions = torch.tensor([p for n in lengths for p in range(n)] + [0] * padding, dtype=torch.int64)
    thresholds = torch.tensor([f for f, n in zip(firsts, lengths) for _ in range(n)] + [1] * padding)
    is_target = positions >= thresholds
    rows = is_target.nonzero()[:, 0]
    counts = torch.tensor([1] * total + [0] * padding)
    return PackedRow(
        tokens=tokens.to(device),
        positions=positions.to(device),
        lengths=lengths,
        predictors=(rows - 1).to(device),
        targets=tokens[rows].to(device),
        counts=counts.to(device),
    )


def pack_scored(
    sequences: Sequence[Sequence[int]],
    scored: Sequence[Sequence[int]],
    left_out: Sequence[int] | None = None,
    device: str | torch.device = "cpu",
) -> PackedRow:
    """Packs what it takes to score some tokens of each sequence: nothing behind the last, and no shared start twice.

    scored: positions of each sequence's targets, ascending. left_out: how many first tokens of each are not packed, for
    the last sequence before it that leaves out none begins with the same ones; None: none. Raises ValueError for a
    target at position 0, and for one whose predictor is left out.
    """
    tokens: list[int] = []
    positions: list[int] = []
    lengths: list[int] = []
    predictors: list[int] = []
    counts: list[int] = []
    lead = 0  # where the last sequence begins that leaves out nothing
    for number, (sequence, targets, first) in enumerate(zip(sequences, scored, left_out or [0] * len(sequences))):
        if targets and targets[0] <= first:
            raise ValueError(f"sequence {number} lacks the predictor of token {targets[0]}: {first} are left out")
        # The last target's own row would predict what nobody scores.
        length = targets[-1] if targets else len(sequence)
        predictors += [len(tokens) + target - 1 - first for target in targets]
        lead = lead if first else len(tokens)
        counts[lead : lead + first] = [count + 1 for count in counts[lead : lead + first]]
        counts += [1] * (length - first)
        tokens += sequence[first:length]
        positions += range(first, length)
        lengths.append(length)
    chosen = [sequence[target] for sequence, own in zip(sequences, scored) for target in own]
    padding = [0] * (-len(tokens) % ROW_MULTIPLE)
    return PackedRow(
        tokens=torch.tensor(tokens + padding, device=device),
        positions=torch.tensor(positions + padding, device=device),
        lengths=lengths,
        predictors=torch.tensor(predictors, dtype=torch.int64, device=device),
        targets=torch.tensor(chosen, dtype=torch.int64, device=device),
        counts=torch.tensor(counts + padding, device=device),
        left_out=None if left_out is None else list(left_out),
    )


def pack_rows(rows: Sequence[Row], device: str | torch.device = "cpu") -> PackedRow:
    """Packs a loader's rows one after the other; sequences, padding and targets are as the rows say."""
    padding = -sum(len(row.tokens) for row in rows) % ROW_MULTIPLE
    lengths = [n for row in rows for n in row.lengths]
    tail = np.zeros(padding, dtype=np.int64)
    tokens = torch.from_numpy(np.concatenate([*(row.tokens for row in rows), tail]))
    positions = torch.from_numpy(np.concatenate([*(np.arange(n) for n in lengths), tail]))
    targets = torch.from_numpy(np.concatenate([row.scored for row in rows]).nonzero()[0])
    counts = torch.from_numpy(
        np.concatenate([*(np.arange(len(row.tokens)) < len(row.tokens) - row.padding for row in rows), tail > 0])
    ).long()
    return PackedRow(
        tokens=tokens.to(device),
        positions=positions.to(device),
        lengths=lengths,
        predictors=(targets - 1).to(device),
        targets=tokens[targets].to(device),
        counts=counts.to(device),
    )


def target_log_probs(
    model: ScoringModel,
    row: PackedRow,
    temperature: float = 1.0,
    states: Float[Tensor, "targets dim"] | None = None,
) -> tuple[Float[Tensor, "targets"], Float[Tensor, "targets"]]:
    """Log-probability of each target, with gradient where it is switched on, and the entropy it was drawn at.

    The policy's loss, scoring and the parity check all call this one function. `states` are the row's
    `predicting_states` where they have been computed already.
    """
    states = predicting_states(model, row) if states is None else states
    return ops.token_log_probs(states, model.head_weight, row.targets, temperature)


def target_log_prob_sum(model: ScoringModel, row: PackedRow, weight: float) -> Float[Tensor, ""]:
    """`weight` times the sum of `target_log_probs`, at a lower cost: the next-token loss."""
    return ops.log_prob_sum(predicting_states(model, row), model.head_weight, row.targets, weight)


def target_scores(model: ScoringModel, row: PackedRow) -> Float[Tensor, "targets"]:
    """A reward model's score, in float32, of the text before each target."""
    return ops.text_scores(predicting_states(model, row), model.head_weight)


def predicting_states(model: ScoringModel, row: PackedRow) -> Float[Tensor, "targets dim"]:
    """The hidden states that the targets are predicted from."""
    if row.lengths:
        model.reserve_positions(max(row.lengths))
    return model(row.tokens, row.positions, row.attend())[row.predictors]


def split_by_tokens(lengths: Sequence[int], tokens_per_microbatch: int) -> list[slice]:
    """Consecutive slices of sequences, each of at most `tokens_per_microbatch` tokens; a longer one stands alone."""
    slices: list[slice] = []
    start, held = 0, 0
    for index, length in enumerate(lengths):
        if index > start and held + length > tokens_per_microbatch:
            slices.append(slice(start, index))
            start, held = index, 0
        held += length
    if start < len(lengths):
        slices.append(slice(start, len(lengths)))
    return slices


def first_fit_decreasing(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Which items go together in bins of `budget`: the largest first, each into the first bin with room for it.

    Needs at most 11/9 of the fewest bins, and one more (D. S. Johnson, 1973). An item above the budget has a bin of its
    own. Items of a bin ascend, and bins by their first item, so that what fits into one bin keeps its order.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        found = next((number for number, left in enumerate(room) if sizes[item] <= left), len(bins))
        if found == len(bins):
            bins.append([])
            room.append(budget)
        bins[found].append(item)
        room[found] -= sizes[item]
    return sorted(sorted(items) for items in bins)
