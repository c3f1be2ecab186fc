"""What pretraining, fine-tuning, preference and reward model runs set up alike: ranks, tokenizer, template, model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from lockstep.config import LoraConfig, PreferenceConfig, PretrainConfig, RLConfig, SFTConfig
from lockstep.data import DataSource, Tokenizer, load_tokenizer, with_ends
from lockstep.data.chat import CHATML, OPTION, ChatTemplate, carry_template, load_chat_template, with_chatml
from lockstep.data.tokenizer import CHAT_TEMPLATE_FILE
from lockstep.errors import UserError
from lockstep.hub import is_local, named_path
from lockstep.model import (
    Decoder,
    ModelConfig,
    TrainableModel,
    begin_adapter,
    begin_tokens,
    initialize,
    load_weights,
    lora_of,
    preset,
    read_config,
    refuse_score_head,
    resolve_dtype,
)
from lockstep.parallel import World, close_world, open_world, parallel_model
from lockstep.train.refusals import refuse_shape, refuse_step
from lockstep.train.resolve_defaults import resolve_defaults

Config = TypeVar("Config", bound=PretrainConfig)


@contextmanager
def training_world(config: Config) -> Iterator[tuple[Config, World]]:
    """Joins the run's ranks; yields its settings, with defaults resolved, and the world.

    Raises UserError if the ranks do not fit the settings.
    """
    world = open_world(config.parallel, config.device)
    try:
        config = resolve_defaults(config, world)
        refuse_step(config, world)
        yield config, world
    finally:
        close_world(world)


def chat_tokenizer(config: SFTConfig) -> Tokenizer:
    """The model's tokenizer, or `config.tokenizer`, with the special tokens of ChatML if that is the template.

    Raises UserError if the model lacks these tokens and the run cannot learn their embeddings.
    """
    tokenizer = load_tokenizer(config.tokenizer or config.model)
    if config.template != CHATML:
        return tokenizer
    tokenizer = with_chatml(tokenizer)
    learns_tokens = not config.lora.rank and not isinstance(config, PreferenceConfig)
    if not learns_tokens and tokenizer.vocab_size > read_config(named_path(config.model)).vocab_size:
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
    """`config.template`, or the template that the data was tokenized with, either of which is saved with the tokenizer;
    otherwise the one in the tokenizer's folder.

    Raises UserError for training or validation data that was tokenized with another template, and for tokenized data
    with settings that only affect tokenization.
    """
    tokenized = [source for source, _ in [*sources, *held_out] if isinstance(source, Path)]
    if tokenized and (config.chat_template_kwargs or config.turns != "apart"):
        option = OPTION if config.chat_template_kwargs else "--turns"
        raise UserError(f"{tokenized[0]}: is tokenized already, so {option} has no effect on it; leave it out")
    folder, made_with = named_path(config.tokenizer or config.model), _template_files(sources)
    template = load_chat_template(folder, config.template)
    carried = bool(config.template)
    if made_with and not carried and (template is None or template.source != made_with[0].read_text()):
        template, carried = load_chat_template(folder, str(made_with[0])), True
    for other in made_with + _template_files(held_out):
        if template is None or other.read_text() != template.source:
            raise UserError(
                f"{other.parent}: was tokenized with another chat template; give --template {other}, or tokenize again"
            )
    if carried and template is not None:
        carry_template(tokenizer, template)
    return template


def _template_files(sources: Sequence[tuple[DataSource, float]]) -> list[Path]:
    files = [source / CHAT_TEMPLATE_FILE for source, _ in sources if isinstance(source, Path)]
    return [file for file in files if file.is_file()]


def model_shape(config: PretrainConfig, tokenizer: Tokenizer, template: ChatTemplate | None = None) -> ModelConfig:
    """A preset's shape with the tokenizer's vocabulary, or a folder's; texts also end as tokenizer and template end
    them."""
    if is_local(folder := named_path(config.model)):
        shape = read_config(folder)
        if tokenizer.vocab_size > shape.vocab_size and isinstance(config, SFTConfig) and config.template == CHATML:
            shape = replace(shape, vocab_size=tokenizer.vocab_size)
        elif tokenizer.vocab_size > shape.vocab_size:
            raise UserError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, but {config.model} only {shape.vocab_size}; leave "
                "--tokenizer out to use the model's own"
            )
        if config.tokenizer not in ("", "byte") and named_path(config.tokenizer).resolve() != folder.resolve():
            # The folder's ids are those of other tokens.
            shape = replace(shape, eos_token_ids=(), bos_token_id=tokenizer.bos_id, pad_token_id=None)
    else:
        shape = preset(config.model, tokenizer.vocab_size)
    return with_ends(shape, tokenizer, template)


def make_model(
    config: PretrainConfig, tokenizer: Tokenizer, world: World, template: ChatTemplate | None = None
) -> TrainableModel:
    """This rank's part of a model with fresh weights, or with a folder's. Raises UserError as `trained_model` does."""
    shape = model_shape(config, tokenizer, template)
    refuse_score_head(shape, config.model)
    fill: Callable[[TrainableModel], None] = partial(initialize, seed=config.seed)
    if folder := is_local(config.model):
        fill = partial(load_weights, path=config.model)
        if shape.vocab_size > (stored := read_config(named_path(config.model)).vocab_size):
            end_of_text = next((token for token in shape.eos_token_ids if token < stored), 0)
            fill = partial(begin_tokens, path=config.model, like=end_of_text)
    if config.lora.rank:
        if not folder:
            raise UserError(f"lora.rank needs the weights of a folder, but {config.model} is a preset; give a folder")
        shape = adapted(shape, config.lora, config.model)
        fill = partial(begin_adapter, path=config.model, seed=config.seed)
    return trained_model(config, shape, world, fill)


def trained_model(
    config: PretrainConfig | RLConfig, shape: ModelConfig, world: World, fill: Callable[[TrainableModel], None]
) -> TrainableModel:
    """This rank's part of a model to train, whose weights `fill` writes.

    Raises UserError, before weights exist, if the shape does not fit the settings and ranks.
    """
    shape = with_precision(shape, config)
    refuse_shape(config, shape, world)
    if config.recompute.mode == "offload" and world.device.type == "cpu":
        raise UserError('recompute.mode "offload" is for CUDA devices: on a CPU, "full" takes the same memory')
    dtype = resolve_dtype(config.dtype)
    model = parallel_model(shape, dtype, world, config.parallel, config.compile, fill, config.recompute)
    if isinstance(model, Decoder) and packs_frozen(config, world):
        model.pack_frozen()
    return model


def with_precision(shape: ModelConfig, config: PretrainConfig | RLConfig) -> ModelConfig:
    """The shape with the run's precision, for a model that was trained in `shape.precision`. Raises UserError."""
    compared = isinstance(config, RLConfig | PreferenceConfig)
    return replace(shape, precision=config.precision.of_model(shape.precision, compared))


def packs_frozen(config: PretrainConfig | RLConfig, world: World) -> bool:
    """Whether no other process and no compiled code needs the frozen weights' own numbers."""
    sends_weights = isinstance(config, RLConfig) and config.actors.separate
    return world.size == 1 and config.compile.backend == "none" and not sends_weights


def adapted(shape: ModelConfig, lora: LoraConfig, model: str) -> ModelConfig:
    """The shape of `model` with a fresh adapter. Raises UserError if it cannot have one, or already has one."""
    if shape.lora is not None:
        raise UserError(
            f"{model}: is already an adapter of rank {shape.lora.rank}; remove lora.rank to continue training it, or "
            "merge the adapter first: lockstep convert --merge"
        )
    return replace(shape, lora=lora_of(shape, lora.rank, lora.alpha, lora.targets))
