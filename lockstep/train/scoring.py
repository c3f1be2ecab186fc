"""Log-probabilities of sequences, computed as in training."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from lockstep.errors import UserError
from lockstep.model import Decoder, check_token_ids
from lockstep.train.packing import pack, split_by_tokens, target_log_probs


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
