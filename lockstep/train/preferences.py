"""The examples of a run on preferences: its data, micro-batches, and log-probabilities of whole answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from lockstep import ops
from lockstep.config import PreferenceConfig, PretrainConfig
from lockstep.config.parallel import ROW_MULTIPLE
from lockstep.data import DataSource, RowLoader, StepRows, is_token_folder, parse_data
from lockstep.data.chat import ChatTemplate, command_values
from lockstep.data.preferences import (
    AnswerTokens,
    Example,
    LabelledRows,
    PreferenceEncoder,
    PreferenceRow,
    PreferenceRows,
    PreferenceSource,
)
from lockstep.data.tokenizer import Tokenizer
from lockstep.errors import UserError
from lockstep.model import ScoringModel
from lockstep.parallel import World
from lockstep.train.context import shard_row, targets_of_others
from lockstep.train.packing import PackedRow, pack_scored, target_log_probs, target_scores
from lockstep.train.rows import run_rows, with_steps
from lockstep.train.setup import chat_template, chat_tokenizer

Config = TypeVar("Config", bound=PreferenceConfig)


def open_preferences(
    config: Config, world: World, paired: bool
) -> tuple[Config, Tokenizer, ChatTemplate | None, RowLoader, StepRows | None]:
    """The run's settings including its steps, the tokenizer and template, and the examples for training and validation.

    Raises UserError for data without preferences.
    """
    tokenizer = chat_tokenizer(config)
    template = chat_template(config, tokenizer, [], [])
    values = command_values(config.chat_template_kwargs, template)
    encoder = PreferenceEncoder(tokenizer, template, config.sequence_length, paired, values)
    rows = PreferenceRows if paired else LabelledRows
    sources = preference_sources(config, config.data)
    held_out_sources = preference_sources(config, config.validation_data) if config.validation_data else []
    loader, held_out = run_rows(config, sources, held_out_sources, encoder, world, rows)
    config = with_steps(config, loader, world, "pairs" if paired else "answers")
    return config, tokenizer, template, loader, held_out


def preference_sources(config: PreferenceConfig, data: str) -> list[tuple[DataSource, float]]:
    """The sources in `data`, each with its weight. Raises UserError for a folder of tokens."""
    sources: list[tuple[DataSource, float]] = []
    for name, weight in parse_data(data):
        if is_token_folder(name):
            raise UserError(f"{name}: contains tokens, not preferences; give .jsonl or .parquet files")
        sources.append((PreferenceSource(name, config.skip_bad_lines), weight))
    return sources


def examples_of(batch: StepRows) -> list[list[Example]]:
    """This rank's examples, by micro-batch."""
    return [
        [example for row in rows if isinstance(row, PreferenceRow) for example in row.examples]
        for rows in batch.microbatches
    ]


Which = Literal["both", "first", "second"]


@dataclass
class PreferenceBatch:
    """Some examples' sequences, packed."""

    row: PackedRow
    examples: list[Example]
    lengths: list[int]
    """Scored tokens of each sequence; the sequences of an example are adjacent."""


def shares_prompts(config: PretrainConfig) -> bool:
    """Whether a pair's prompt is computed once: not if ranks share rows, nor with a deterministic layout."""
    return config.parallel.context == 1 and not config.train.deterministic_layout


def preference_batch(
    examples: Sequence[Example], world: World, share_prompts: bool, which: Which = "both"
) -> PreferenceBatch:
    """One micro-batch; without examples it is padding, for ranks with fewer micro-batches of examples.

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

    Each answer's sum has the same bits in any batch. Ranks that share a row all have all sums, each with the gradient
    of its tokens: only one of them counts them.
    """
    log_probs, counts = _of_all_ranks(target_log_probs(model, batch.row)[0], batch.row)
    if not batch.lengths:
        return log_probs.sum()[None][:0] + 0.0 * log_probs.sum(), counts
    return torch.stack([ops.total(part) for part in log_probs.split(batch.lengths)]), counts


def end_scores(model: ScoringModel, batch: PreferenceBatch) -> tuple[Float[Tensor, "sequences"], bool]:
    """A reward model's score of each sequence, as `answer_log_probs`; the sequences come from `with_end_target`."""
    scores, counts = _of_all_ranks(target_scores(model, batch.row), batch.row)
    return (scores if batch.lengths else scores[:0] + 0.0 * scores.sum()), counts


def with_end_target(example: Example) -> Example:
    """The example with sequences whose only target follows the last token, so that it is scored as a whole."""
    first, second = (AnswerTokens([*s.tokens, 0], [len(s.tokens)]) for s in example.sequences)
    return replace(example, sequences=(first, second))


def _of_all_ranks(local: Float[Tensor, "local"], row: PackedRow) -> tuple[Float[Tensor, "targets"], bool]:
    """The values of all targets, from this rank and those that share the row, and whether this rank counts them."""
    shared = targets_of_others(row)
    return (local, True) if shared is None else (shared.whole(local), shared.is_first)


def example_share(losses: Float[Tensor, "examples"], count: int, counts: bool) -> Float[Tensor, ""]:
    """A micro-batch's share of the mean loss over a step's `count` examples; counts: whether this rank counts it."""
    loss = ops.total(losses) / max(count, 1)
    # Ranks that share a row all have the whole loss, each with the gradient of its tokens: it counts once.
    return loss if counts else loss - loss.detach()


class Means:
    """Means of named values over a step's examples, on all ranks; values that did not occur are left out."""

    def __init__(self, names: Sequence[str]):
        self._totals = {name: [0.0, 0] for name in names}

    def add(self, name: str, value: float, count: int = 1) -> None:
        """Adds a value, or the sum of `count` values."""
        total = self._totals[name]
        total[0] += value
        total[1] += count

    def over(self, world: World) -> dict[str, float]:
        sums = world.sum([number for total in self._totals.values() for number in total])
        return {name: total / count for name, total, count in zip(self._totals, sums[::2], sums[1::2]) if count}
