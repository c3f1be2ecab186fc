"""Fine-tuning on conversations: a pretraining run whose loss counts only the assistant's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.config import PreferenceConfig, SFTConfig, validate_run
from lockstep.data import (
    ByteTokenizer,
    ConversationEncoder,
    ConversationSource,
    DataSource,
    HuggingFaceTokenizer,
    divide,
    divide_step,
    is_token_folder,
    load_tokenizer,
    open_token_folder,
    parse_data,
)
from lockstep.data.chat import ChatTemplate, carry_template, load_chat_template
from lockstep.data.chatml import CHATML, with_chatml
from lockstep.data.template_values import OPTION, command_values
from lockstep.data.tokenizer import CHAT_TEMPLATE_FILE, Tokenizer
from lockstep.errors import UserError
from lockstep.model import read_config
from lockstep.observe import OnMetrics, announce, log
from lockstep.parallel import World, close_world, open_world
from lockstep.progress import Progress
from lockstep.train.answers import Answers
from lockstep.train.epochs import with_steps
from lockstep.train.pretrain import make_loader, make_model
from lockstep.train.resolve_defaults import resolve_defaults
from lockstep.train.rows_task import RowsRun, train_rows
from lockstep.train.validation import validation_rows


def finetune(config: SFTConfig, progress: Progress | None = None, on_metrics: OnMetrics | None = None) -> Path:
    """Trains the model in `config.model` on the conversations in `config.data`; returns the run's folder.

    Its checkpoints include the chat template. Under torchrun, all ranks call it and rank 0 writes; it calls
    `on_metrics(step, metrics)` after every step. Raises UserError for bad input.
    """
    validate_run(config, SFTConfig)
    world = open_world(config.parallel, config.device)
    try:
        return _sft(resolve_defaults(config, world), world, progress, on_metrics)
    finally:
        close_world(world)


def _sft(config: SFTConfig, world: World, progress: Progress | None, on_metrics: OnMetrics | None) -> Path:
    tokens, fixed = config.train.tokens_per_microbatch, config.train.deterministic_layout
    divide_step(config.sequence_length, config.tokens_per_step, tokens, world.data_size, fixed)
    sources = conversation_sources(config, config.data)
    held_out_sources = conversation_sources(config, config.validation_data) if config.validation_data else []
    tokenizer = chat_tokenizer(config)
    template = chat_template(config, tokenizer, sources, held_out_sources)
    values = command_values(config.chat_template_kwargs, template)
    encoder = ConversationEncoder(tokenizer, template, config.turns, values)
    model = make_model(config, tokenizer, world, template)
    if config.validation_share:
        sources, held_out_sources = divide(sources, config.validation_share)
    loader = make_loader(config, sources, encoder, world)
    if (apart := loader.counts.get("data/answers_apart", 0)) and world.is_main:
        announce(
            f"sft: {apart} answers that the chat template writes otherwise once others follow are sequences of their "
            f"own, as sampled: {loader.counts['data/tokens_apart']} tokens more (--turns whole: none)"
        )
    if (cut := loader.counts.get("data/cut_documents", 0)) and world.is_main:
        log.warning(
            "%d conversations are longer than a row of %d tokens and are cut: what the assistant says after a cut is "
            "learned without what came before it, and a part in which it says nothing is left out; give a larger "
            "--sequence-length, or leave them out",
            cut,
            config.sequence_length,
        )
    config = with_steps(config, loader, world, "conversations")
    held_out = validation_rows(config, held_out_sources, encoder, world)
    answers = None
    if world.mesh is None and config.steps:
        shown = held_out.microbatches if held_out is not None else loader.peek().microbatches
        answers = Answers([row for rows in shown for row in rows], tokenizer, Path(config.output))
    parts = RowsRun(tokenizer, model, loader, held_out, "sft", answers=answers)
    return train_rows(config, world, parts, progress, on_metrics)


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


def chat_tokenizer(config: SFTConfig) -> ByteTokenizer | HuggingFaceTokenizer:
    """The model's tokenizer, or the one given, with the tokens of a template that brings its own.

    Raises UserError for a run that cannot learn what tokens that the model lacks mean.
    """
    tokenizer = load_tokenizer(config.tokenizer or config.model)
    if config.template != CHATML:
        return tokenizer
    tokenizer = with_chatml(tokenizer)
    learns_tokens = not config.lora.rank and not isinstance(config, PreferenceConfig)
    if not learns_tokens and tokenizer.vocab_size > read_config(Path(config.model)).vocab_size:
        raise UserError(
            f"{config.model}: lacks the tokens of template {CHATML}, which only full fine-tuning learns; first train "
            f"all weights on conversations: lockstep sft --template {CHATML}"
        )
    return tokenizer


def chat_template(
    config: SFTConfig,
    tokenizer: Tokenizer,
    sources: Sequence[tuple[DataSource, float]],
    held_out: Sequence[tuple[DataSource, float]],
) -> ChatTemplate | None:
    """The template given, or that which the data was tokenized with, which is then saved with the tokenizer; else the
    one in the tokenizer's folder.

    Raises UserError for training or validation data that was tokenized with another one, or that was tokenized if there
    are values for the template.
    """
    tokenized = [source for source, _ in [*sources, *held_out] if isinstance(source, Path)]
    if tokenized and (config.chat_template_kwargs or config.turns != "apart"):
        option = OPTION if config.chat_template_kwargs else "--turns"
        raise UserError(f"{tokenized[0]}: is tokenized already, so {option} has no effect on it; leave it out")
    folder, made_with = Path(config.tokenizer or config.model), _template_files(sources)
    template = load_chat_template(folder, config.template)
    given = bool(config.template)
    if made_with and not given and (template is None or template.source != made_with[0].read_text()):
        template, given = load_chat_template(folder, str(made_with[0])), True
    for other in made_with + _template_files(held_out):
        if template is None or other.read_text() != template.source:
            raise UserError(
                f"{other.parent}: was tokenized with another chat template; give --template {other}, or tokenize again"
            )
    if given and template is not None:
        carry_template(tokenizer, template)
    return template


def _template_files(sources: Sequence[tuple[DataSource, float]]) -> list[Path]:
    files = [source / CHAT_TEMPLATE_FILE for source, _ in sources if isinstance(source, Path)]
    return [file for file in files if file.is_file()]
