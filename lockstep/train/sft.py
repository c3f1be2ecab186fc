"""Fine-tuning on conversations: a pretraining run whose loss counts only the assistant's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lockstep.config import SFTConfig, validate_run
from lockstep.data import (
    ConversationEncoder,
    ConversationSource,
    DataSource,
    is_token_folder,
    open_token_folder,
    parse_data,
)
from lockstep.data.chat import command_values
from lockstep.errors import UserError
from lockstep.observe import OnMetrics, announce, log
from lockstep.progress import Progress
from lockstep.train.answers import Answers
from lockstep.train.rows import run_rows, with_steps
from lockstep.train.rows_task import RowsRun, train_rows
from lockstep.train.setup import chat_template, chat_tokenizer, make_model, training_world


def finetune(config: SFTConfig, progress: Progress | None = None, on_metrics: OnMetrics | None = None) -> Path:
    """Trains the model in `config.model` on the conversations in `config.data`; returns the run's folder.

    Its checkpoints include the chat template. Under torchrun, all ranks call it and rank 0 writes; it calls
    `on_metrics(step, metrics)` after every step. Raises UserError for bad input.
    """
    validate_run(config, SFTConfig)
    with training_world(config) as (config, world):
        sources = conversation_sources(config, config.data)
        held_out_sources = conversation_sources(config, config.validation_data) if config.validation_data else []
        tokenizer = chat_tokenizer(config)
        template = chat_template(config, tokenizer, sources, held_out_sources)
        values = command_values(config.chat_template_kwargs, template)
        encoder = ConversationEncoder(tokenizer, template, config.turns, values)
        model = make_model(config, tokenizer, world, template)
        loader, held_out = run_rows(config, sources, held_out_sources, encoder, world)
        if world.is_main:
            _announce_split_conversations(loader.counts, config.sequence_length)
        config = with_steps(config, loader, world, "conversations")
        answers = None
        if world.mesh is None and config.steps:
            shown = held_out.microbatches if held_out is not None else loader.peek().microbatches
            answers = Answers([row for rows in shown for row in rows], tokenizer, Path(config.output))
        parts = RowsRun(tokenizer, model, loader, held_out, "sft", answers=answers)
        return train_rows(config, world, parts, progress, on_metrics)


def _announce_split_conversations(counts: Mapping[str, float], sequence_length: int) -> None:
    """Announces answers that are separate sequences, and warns of conversations that are cut. counts: the loader's."""
    if apart := counts.get("data/answers_apart", 0):
        announce(
            f"sft: {apart} answers that the chat template writes otherwise once others follow are sequences of their "
            f"own, as sampled: {counts['data/tokens_apart']} tokens more (--turns whole: none)"
        )
    if cut := counts.get("data/cut_documents", 0):
        log.warning(
            "%d conversations are longer than a row of %d tokens and are cut: what the assistant says after a cut is "
            "learned without what came before it, and a part in which it says nothing is left out; give a larger "
            "--sequence-length, or leave them out",
            cut,
            sequence_length,
        )


def conversation_sources(config: SFTConfig, data: str) -> list[tuple[DataSource, float]]:
    """The sources in `data`, each with its weight. Raises UserError for tokens that are not from conversations."""
    sources: list[tuple[DataSource, float]] = []
    for name, weight in parse_data(data):
        if not is_token_folder(name):
            sources.append((ConversationSource(name, config.skip_bad_lines), weight))
        elif open_token_folder(Path(name)).scored is None:
            raise UserError(f"{name}: was tokenized as text; use lockstep data tokenize --chat for conversations")
        else:
            sources.append((Path(name), weight))
    return sources
