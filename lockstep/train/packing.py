"""Sequences side by side in one packed row, and which of its positions predict which token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

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
    attention: ops.Attention | None = None
    """How its tokens attend; None: each to its own sequence up to itself, all of which is here."""


def pack(
    sequences: Sequence[Sequence[int]],
    first_targets: Sequence[int] | None = None,
    device: str | torch.device = "cpu",
    targets: Sequence[Sequence[int]] | None = None,
) -> PackedRow:
    """Packs `sequences`; of each, the tokens from index `first_targets` on (default 1: all but the first) are targets,
    or those at the positions that `targets` gives.

    Raises ValueError for an empty sequence or a first target below 1: nothing comes before token 0.
    """
    if targets is not None:
        first_targets = [min(own, default=len(s)) for own, s in zip(targets, sequences, strict=True)]
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
    if targets is not None:
        starts = accumulate([0, *lengths])
        places = [start + place for start, own in zip(starts, targets) for place in own]
        is_target = torch.zeros_like(is_target).scatter(0, torch.tensor(places, dtype=torch.int64), True)
    rows = is_target.nonzero()[:, 0]
    return PackedRow(tokens.to(device), positions.to(device), lengths, (rows - 1).to(device), tokens[rows].to(device))


def pack_rows(rows: Sequence[Row], device: str | torch.device = "cpu") -> PackedRow:
    """Packs a loader's rows one after the other; sequences, padding and targets are as the rows say."""
    padding = -sum(len(row.tokens) for row in rows) % ROW_MULTIPLE
    lengths = [n for row in rows for n in row.lengths]
    tail = np.zeros(padding, dtype=np.int64)
    tokens = torch.from_numpy(np.concatenate([*(row.tokens for row in rows), tail]))
    positions = torch.from_numpy(np.concatenate([*(np.arange(n) for n in lengths), tail]))
    targets = torch.from_numpy(np.concatenate([row.scored for row in rows]).nonzero()[0])
    return PackedRow(
        tokens.to(device), positions.to(device), lengths, (targets - 1).to(device), tokens[targets].to(device)
    )


def target_log_probs(
    model: ScoringModel, row: PackedRow, temperature: float = 1.0
) -> tuple[Float[Tensor, "targets"], Float[Tensor, "targets"]]:
    """Log-probability of each target, with gradient where it is switched on, and the entropy it was drawn at.

    The policy's loss, scoring and the parity check all call this one function.
    """
    return ops.token_log_probs(_predicting(model, row), model.head_weight, row.targets, temperature)


def target_log_prob_sum(model: ScoringModel, row: PackedRow, weight: float) -> Float[Tensor, ""]:
    """`weight` times the sum of `target_log_probs`, at a lower cost: the next-token loss."""
    return ops.log_prob_sum(_predicting(model, row), model.head_weight, row.targets, weight)


def _predicting(model: ScoringModel, row: PackedRow) -> Float[Tensor, "targets dim"]:
    if row.lengths:
        model.reserve_positions(max(row.lengths))
    attention = row.attention or ops.PackedAttention(row.lengths, row.tokens.device)
    return model(row.tokens, row.positions, attention)[row.predictors]


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
