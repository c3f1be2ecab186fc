"""Log-probabilities of given sequences, computed as in training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
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
    """`result[i][t]` = log p(sequences[i][t+1] | sequences[i][: t+1]) at `temperature`, float32.

    Bit for bit what `Engine.generate` reports for the same tokens at the same temperature; at 0, greedy, both give
    those at 1. Raises UserError for sequences that are empty, exceed the model's context or contain tokens outside its
    vocabulary.
    """
    limit = model.config.max_positions
    for number, sequence in enumerate(sequences):
        check_token_ids(sequence, model.config.vocab_size, f"sequence {number}")
        if len(sequence) > limit:
            raise UserError(f"sequence {number} has {len(sequence)} tokens, more than the model's context of {limit}")
    scores: list[Tensor] = []
    for part in split_by_tokens([len(s) for s in sequences], tokens_per_microbatch):
        row = pack(sequences[part], device=model.device)
        log_probs, _ = target_log_probs(model, row, temperature)
        scores += log_probs.split([n - 1 for n in row.lengths])
    return scores
