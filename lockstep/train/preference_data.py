"""The examples of a run on preferences."""

from __future__ import annotations

from typing import TypeVar

from lockstep.config import PreferenceConfig
from lockstep.data import DataSource, RowLoader, StepRows, divide, is_token_folder, parse_data
from lockstep.data.chat import ChatTemplate
from lockstep.data.preferences import (
    Example,
    LabelledRows,
    PreferenceEncoder,
    PreferenceRow,
    PreferenceRows,
    PreferenceSource,
)
from lockstep.data.template_values import command_values
from lockstep.data.tokenizer import Tokenizer
from lockstep.errors import UserError
from lockstep.parallel import World
from lockstep.train.chat_setup import chat_template, chat_tokenizer
from lockstep.train.epochs import with_steps
from lockstep.train.setup import make_loader
from lockstep.train.validation import validation_rows

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
    if config.validation_share:
        sources, held_out_sources = divide(sources, config.validation_share)
    loader = make_loader(config, sources, encoder, world, rows)
    config = with_steps(config, loader, world, "pairs" if paired else "answers")
    return config, tokenizer, template, loader, validation_rows(config, held_out_sources, encoder, world, rows)


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
