"""Micro-batches of preference examples, and the log-probabilities of whole answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lockstep import ops
from lockstep.config import PretrainConfig
from lockstep.config.parallel import ROW_MULTIPLE
from lockstep.data.preferences import AnswerTokens, Example
from lockstep.model import ScoringModel
from lockstep.parallel import World
from lockstep.train.context import shard_row, targets_of_others
from lockstep.train.packing import PackedRow, pack_scored, target_log_probs, target_scores

Which = Literal["both", "first", "second"]


@dataclass
class PreferenceBatch:
    """Some examples' sequences, packed."""

    row: PackedRow
    examples: list[Example]
    lengths: list[int]
    """Scored tokens of each sequence; the sequences of an example are adjacent."""


def shares_prompts(config: PretrainConfig) -> bool:
    """Whether a pair's prompt is computed once; not if ranks share a row, nor with a deterministic layout."""
    return config.parallel.context == 1 and not config.train.deterministic_layout


def preference_batch(
    examples: Sequence[Example], world: World, share_prompts: bool, which: Which = "both"
) -> PreferenceBatch:
    """One micro-batch; without examples it is padding, for ranks with fewer of them.

    which: the sequences of each example that are computed. share_prompts: compute their common prefix once.
    """
    sequences: list[AnswerTokens] = []
    for first, second in (example.sequences for example in examples):
        sequences += {"both": [first, second], "first": [first], "second": [second]}[which]
    left_out = [n for example in examples for n in [0, _common(*example.sequences)][: 2 if which == "both" else 1]]
    row = pack_scored(
        [s.tokens for s in sequences] or [[0] * ROW_MULTIPLE],
        [s.scored for s in sequences] or [[]],
        left_out if share_prompts and sequences else None,
        world.device,
    )
    row = row if sequences else row.idle()
    return PreferenceBatch(shard_row(row, world), list(examples), [len(s.scored) for s in sequences])


def _common(first: AnswerTokens, second: AnswerTokens) -> int:
    """The length of their common prefix, before the predictors of their answers."""
    most = min(first.scored[0], second.scored[0]) - 1
    pairs = zip(first.tokens[:most], second.tokens[:most])
    return next((index for index, (one, other) in enumerate(pairs) if one != other), most)


def answer_log_probs(model: ScoringModel, batch: PreferenceBatch) -> tuple[Float[Tensor, "sequences"], bool]:
    """log π(y|x) of each sequence's answer, with gradient if enabled, and whether this rank counts it.

    Each answer's sum has the same bits in any batch. Ranks that share a row all have all sums, with the gradient of
    their own tokens: only one of them counts them.
    """
    log_probs, counts = _of_all_ranks(target_log_probs(model, batch.row)[0], batch.row)
    if not batch.lengths:
        return log_probs.sum()[None][:0] + 0.0 * log_probs.sum(), counts
    return torch.stack([ops.total(part) for part in log_probs.split(batch.lengths)]), counts


def end_scores(model: ScoringModel, batch: PreferenceBatch) -> tuple[Float[Tensor, "sequences"], bool]:
    """A reward model's score of each sequence, as `answer_log_probs`; the sequences come from `ending`."""
    scores, counts = _of_all_ranks(target_scores(model, batch.row), batch.row)
    return (scores if batch.lengths else scores[:0] + 0.0 * scores.sum()), counts


def ending(example: Example) -> Example:
    """The example with sequences whose only target comes after the last token, where the whole text is known."""
    first, second = (AnswerTokens([*s.tokens, 0], [len(s.tokens)]) for s in example.sequences)
    return replace(example, sequences=(first, second))


def _of_all_ranks(own: Float[Tensor, "local"], row: PackedRow) -> tuple[Float[Tensor, "targets"], bool]:
    """The values of all targets, from this rank and those that share the row, and whether this rank counts them."""
    shared = targets_of_others(row)
    return (own, True) if shared is None else (shared.whole(own), shared.is_first)
