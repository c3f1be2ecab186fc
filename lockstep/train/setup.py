"""What pretraining, fine-tuning, preference and reward model runs set up alike: ranks and model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from lockstep.config import LoraConfig, PretrainConfig, RLConfig, SFTConfig
from lockstep.data import Tokenizer, with_ends
from lockstep.data.chat import ChatTemplate
from lockstep.data.chatml import CHATML
from lockstep.errors import UserError
from lockstep.model import (
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


def model_shape(config: PretrainConfig, tokenizer: Tokenizer, template: ChatTemplate | None = None) -> ModelConfig:
    """A preset's shape with the tokenizer's vocabulary, or a folder's; texts also end as tokenizer and template end
    them."""
    if (folder := Path(config.model)).is_dir():
        shape = read_config(Path(config.model))
        if tokenizer.vocab_size > shape.vocab_size and isinstance(config, SFTConfig) and config.template == CHATML:
            shape = replace(shape, vocab_size=tokenizer.vocab_size)
        elif tokenizer.vocab_size > shape.vocab_size:
            raise UserError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, but {config.model} only {shape.vocab_size}; leave "
                "--tokenizer out to use the model's own"
            )
        if config.tokenizer not in ("", "byte") and Path(config.tokenizer).resolve() != folder.resolve():
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
    if folder := Path(config.model).is_dir():
        fill = partial(load_weights, path=config.model)
        if shape.vocab_size > (stored := read_config(Path(config.model)).vocab_size):
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
    refuse_shape(config, shape, world)
    dtype = resolve_dtype(config.dtype)
    return parallel_model(shape, dtype, world, config.parallel, config.compile, fill, config.recompute)


def adapted(shape: ModelConfig, lora: LoraConfig, model: str) -> ModelConfig:
    """The shape of `model` with a fresh adapter. Raises UserError if it cannot have one, or already has one."""
    if shape.lora is not None:
        raise UserError(
            f"{model}: is already an adapter of rank {shape.lora.rank}; remove lora.rank to continue training it, or "
            "merge the adapter first: lockstep convert --merge"
        )
    return replace(shape, lora=lora_of(shape, lora.rank, lora.alpha, lora.targets))
