"""Sequences packed into one row, which of its positions predict which token, and the predicted log-probabilities."""

from __future__ import annotations

import math
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
from lockstep.errors import UserError
from lockstep.model import Decoder, ScoringModel, check_token_ids


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
    """How many of the sequences' tokens each row stands for: 0 for padding, several for a shared prefix."""
    attention: ops.Attention | None = None
    """How its tokens attend; None: causally within their own sequence, all of which is in the row."""
    left_out: list[int] | None = None
    """How many of each sequence's first tokens are not in the row but shared with the last complete sequence before it;
    None: all sequences are complete."""

    def attend(self) -> ops.Attention:
        """How its tokens attend: `attention`, or as its sequences imply; with `row_counts` for the model."""
        attention: Any = self.attention
        if attention is None and self.left_out and any(self.left_out):
            attention = ops.SharedPrefixAttention(self.lengths, self.left_out, self.tokens.device)
        elif attention is None:
            attention = ops.PackedAttention(self.lengths, self.tokens.device)
        attention.row_counts = self.counts
        return attention  # type: ignore[no-any-return]

    def idle(self) -> PackedRow:
        """The same row with zero counts, for a rank that has nothing left to compute while others do."""
        return replace(self, counts=torch.zeros_like(self.counts))


def pack(
    sequences: Sequence[Sequence[int]],
    first_targets: Sequence[int] | None = None,
    device: str | torch.device = "cpu",
) -> PackedRow:
    """Packs `sequences`; the tokens of each from index `first_targets` on (default 1: all but the first) are targets.

    Raises ValueError for an empty sequence or a first target below 1: nothing comes before token 0.
    """
    firsts = [1] * len(sequences) if first_targets is None else list(first_targets)
    lengths = [len(s) for s in sequences]
    if not all(lengths) or not all(f >= 1 for f in firsts):
        raise ValueError(f"cannot pack sequences of {lengths} tokens with first targets {firsts}")
    total = sum(lengths)
    # The ranks of a tensor group share the rows evenly; attention ignores the padding.
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
    """Packs what scoring some tokens of each sequence needs: nothing after the last target, and shared prefixes once.

    scored: positions of each sequence's targets, ascending. left_out: how many first tokens of each are not packed
    because the last complete sequence before it begins with the same ones; None: none. Raises ValueError for a target
    at position 0, or one whose predictor is left out.
    """
    tokens: list[int] = []
    positions: list[int] = []
    lengths: list[int] = []
    predictors: list[int] = []
    counts: list[int] = []
    lead = 0  # where the last complete sequence begins
    for number, (sequence, targets, first) in enumerate(zip(sequences, scored, left_out or [0] * len(sequences))):
        if targets and targets[0] <= first:
            raise ValueError(f"sequence {number} lacks the predictor of token {targets[0]}: {first} are left out")
        # The last target's row would predict a token that is not scored.
        length = targets[-1] if targets else len(sequence)
        predictors += [len(tokens) + target - 1 - first for target in targets]
        lead = lead if first else len(tokens)
        counts[lead : lead + first] = [count + 1 for count in counts[lead : lead + first]]
        counts += [1] * (length - first)
        tokens += sequence[first:length]
        positions += range(first, length)
        lengths.append(length)
    chosen = [sequence[target] for sequence, targets in zip(sequences, scored) for target in targets]
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
    """Packs a loader's rows one after the other; sequences, padding and targets are those of the rows."""
    padding = -sum(len(row.tokens) for row in rows) % ROW_MULTIPLE
    lengths = [n for row in rows for n in row.complete_lengths()]
    left_out = [n for row in rows for n in row.shared or [0] * len(row.lengths)]
    tail = np.zeros(padding, dtype=np.int64)
    tokens = torch.from_numpy(np.concatenate([*(row.tokens for row in rows), tail]))
    positions = torch.from_numpy(np.concatenate([*(np.arange(m, n) for m, n in zip(left_out, lengths)), tail]))
    targets = torch.from_numpy(np.concatenate([row.scored for row in rows]).nonzero()[0])
    counts = np.concatenate(
        [*(np.arange(len(row.tokens)) < len(row.tokens) - row.padding for row in rows), tail > 0], dtype=np.int64
    )
    place = lead = 0
    for length, shared in zip(lengths, left_out):
        lead = lead if shared else place
        counts[lead : lead + shared] += 1
        place += length - shared
    return PackedRow(
        tokens=tokens.to(device),
        positions=positions.to(device),
        lengths=lengths,
        predictors=(targets - 1).to(device),
        targets=tokens[targets].to(device),
        counts=torch.from_numpy(counts).to(device),
        left_out=left_out if any(left_out) else None,
    )


def target_log_probs(
    model: ScoringModel,
    row: PackedRow,
    temperature: float = 1.0,
    states: Float[Tensor, "targets dim"] | None = None,
) -> tuple[Float[Tensor, "targets"], Float[Tensor, "targets"]]:
    """Log-probability of each target, with gradient if enabled, and the entropy of its distribution.

    The policy loss, scoring and the parity check all call this one function. `states`: the row's `predicting_states`,
    if they have already been computed.
    """
    states = predicting_states(model, row) if states is None else states
    terms = model.head_terms.of(row.predictors)
    return ops.token_log_probs(states, model.head_weight, row.targets, temperature, terms)


def target_log_prob_sum(model: ScoringModel, row: PackedRow, weight: float) -> Float[Tensor, ""]:
    """`weight` times the sum of `target_log_probs`, but cheaper: the next-token loss."""
    states, terms = predicting_states(model, row), model.head_terms.of(row.predictors)
    return ops.log_prob_sum(states, model.head_weight, row.targets, weight, terms)


def target_scores(model: ScoringModel, row: PackedRow) -> Float[Tensor, "targets"]:
    """A reward model's score, in float32, of the text before each target."""
    return ops.text_scores(predicting_states(model, row), model.head_weight)


def predicting_states(model: ScoringModel, row: PackedRow) -> Float[Tensor, "targets dim"]:
    """The hidden states that the targets are predicted from."""
    if row.lengths:
        model.reserve_positions(max(row.lengths))
    return model(row.tokens, row.positions, row.attend())[row.predictors]


def split_by_tokens(lengths: Sequence[int], tokens_per_microbatch: int) -> list[slice]:
    """Consecutive slices of sequences, each of at most `tokens_per_microbatch` tokens; a longer sequence is alone."""
    slices: list[slice] = []
    start, tokens = 0, 0
    for index, length in enumerate(lengths):
        if index > start and tokens + length > tokens_per_microbatch:
            slices.append(slice(start, index))
            start, tokens = index, 0
        tokens += length
    if start < len(lengths):
        slices.append(slice(start, len(lengths)))
    return slices


def first_fit_decreasing(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Packs items into bins of `budget`: the largest first, each into the first bin with room for it.

    Needs at most 11/9 of the minimal number of bins, plus one (D. S. Johnson, 1973). An item above the budget gets a
    bin to itself. Items within a bin ascend, and bins by their first item, so that items that fit into one bin keep
    their order.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        fitting = next((number for number, left in enumerate(room) if sizes[item] <= left), len(bins))
        if fitting == len(bins):
            bins.append([])
            room.append(budget)
        bins[fitting].append(item)
        room[fitting] -= sizes[item]
    return sorted(sorted(items) for items in bins)


@torch.no_grad()
def score(
    model: Decoder,
    sequences: Sequence[Sequence[int]],
    temperature: float = 1.0,
    tokens_per_microbatch: int = 8192,
) -> list[Tensor]:
    """`result[i][t]` = log p(sequences[i][t+1] | sequences[i][: t+1]) at `temperature`, float32, without a gradient.

    Bit for bit what `Engine.generate` reports for the same tokens at the same temperature; at 0, greedy, both give
    those at 1. For a loss of your own, `lockstep.train.log_probs` gives the same bits with a gradient. Raises UserError
    for sequences that are empty, exceed the model's context or contain tokens outside its vocabulary.
    """
    _check(model, sequences, temperature)
    scores: list[Tensor] = []
    for part in split_by_tokens([len(s) for s in sequences], tokens_per_microbatch):
        scores += _log_probs(model, sequences[part], temperature)
    return scores


def log_probs(
    model: Decoder, rows: Sequence[Sequence[int]], temperature: float = 1.0
) -> list[Float[Tensor, "targets"]]:
    """`result[i][t]` = log p(rows[i][t+1] | rows[i][: t+1]) at `temperature`, float32, with a gradient to the weights.

    The same bits as `score`, and so as `Engine.generate`. All rows are packed into one forward and backward pass: give
    as many as fit into memory, and add up the gradients of several calls. Raises UserError as `score` does.
    """
    _check(model, rows, temperature)
    return _log_probs(model, rows, temperature) if rows else []


def _log_probs(model: Decoder, sequences: Sequence[Sequence[int]], temperature: float) -> list[Tensor]:
    row = pack(sequences, device=model.device)
    scores, _ = target_log_probs(model, row, temperature)
    return list(scores.split([n - 1 for n in row.lengths]))


def _check(model: Decoder, sequences: Sequence[Sequence[int]], temperature: float) -> None:
    if not 0 <= temperature < math.inf:
        raise UserError(f"temperature is {temperature}; give a number of 0 or more")
    limit = model.config.max_positions
    for number, sequence in enumerate(sequences):
        check_token_ids(sequence, model.config.vocab_size, f"sequence {number}")
        if len(sequence) > limit:
            raise UserError(f"sequence {number} has {len(sequence)} tokens, more than the model's context of {limit}")
