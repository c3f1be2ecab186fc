"""A pretraining run on text, top to bottom."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lockstep.checkpoint import folder_if_model, newest_checkpoint
from lockstep.config import PretrainConfig, SFTConfig, validate, validate_run
from lockstep.data import (
    DataSource,
    Encoder,
    RowLoader,
    Rows,
    TextEncoder,
    TextSource,
    Tokenizer,
    divide,
    divide_step,
    is_token_folder,
    load_tokenizer,
    named_tokenizer,
    open_rows,
    parse_data,
    tokenize_documents,
    with_ends,
)
from lockstep.data.chat import ChatTemplate
from lockstep.data.chatml import CHATML
from lockstep.errors import UserError
from lockstep.hub import is_model
from lockstep.model import (
    ModelConfig,
    TrainableModel,
    begin_adapter,
    begin_tokens,
    choose_dtype,
    initialize,
    is_auto,
    load_weights,
    preset,
    read_config,
    refuse_score_head,
    resolve_dtype,
)
from lockstep.observe import (
    OnMetrics,
)
from lockstep.parallel import World, close_world, open_world, parallel_model
from lockstep.progress import Progress
from lockstep.train.adapter import adapted
from lockstep.train.objective import NextTokenLoss
from lockstep.train.read_once import learn_once, read_once
from lockstep.train.resolve_defaults import recorded_settings, resolve_defaults
from lockstep.train.rows_task import RowsRun, train_rows
from lockstep.train.validation import validation_rows

if TYPE_CHECKING:
    from lockstep.train.dry_run import DryRun

LARGE = 10**9
"""A model with at least this many parameters needs its own data and tokenizer."""


def pretrain(
    config: PretrainConfig,
    documents: Iterable[str] | None = None,
    progress: Progress | None = None,
    on_metrics: OnMetrics | None = None,
) -> Path:
    """Trains `config.model` on `config.data`, or on `documents` if given; returns the run's folder.

    Under torchrun, all ranks call it. Only rank 0's documents are read; rank 0 writes and calls `on_metrics(step,
    metrics)` after every step: what it raises ends the run once that step is saved, `lockstep.StopRun` without an
    error. Raises UserError for bad input.
    """
    validate_run(config, PretrainConfig)
    if documents is None:
        _refuse_toy_data(config)
    world = open_world(config.parallel, config.device)
    try:
        return _pretrain(resolve_defaults(config, world), world, documents, progress, on_metrics)
    finally:
        close_world(world)


def _pretrain(
    config: PretrainConfig,
    world: World,
    documents: Iterable[str] | None,
    progress: Progress | None,
    on_metrics: OnMetrics | None,
) -> Path:
    tokens, fixed = config.train.tokens_per_microbatch, config.train.deterministic_layout
    divide_step(config.sequence_length, config.tokens_per_step, tokens, world.data_size, fixed)
    sources: list[tuple[DataSource, float]] = [] if documents is not None else text_sources(config, config.data)
    texts = [source for source, _ in sources if isinstance(source, TextSource)] if documents is None else [documents]
    folders = [source for source, _ in sources if isinstance(source, Path)]
    tokenizer = learnt_before(config, world) or make_tokenizer(config, world, texts, folders)
    model = make_model(config, tokenizer, world)
    if documents is not None:
        corpus = read_once(world, lambda: tokenize_documents(documents, tokenizer, config.skip_bad_lines))
        assert corpus is not None
        sources = [(corpus, 1.0)]
    encoder = TextEncoder(tokenizer)
    held_out_sources = text_sources(config, config.validation_data) if config.validation_data else []
    if config.validation_share:
        sources, held_out_sources = divide(sources, config.validation_share)
    loader = make_loader(config, sources, encoder, world)
    held_out = validation_rows(config, held_out_sources, encoder, world)
    return train_rows(config, world, RowsRun(tokenizer, model, loader, held_out), progress, on_metrics)


def _refuse_toy_data(config: PretrainConfig) -> None:
    """Raises UserError if a large model would be trained on a small model's defaults, probably by mistake."""
    if is_model(config.model) or config.lora.rank or preset(config.model).num_parameters < LARGE:
        return
    if not config.data:
        raise UserError(
            f"data is empty, so the standard library's source would be used, which is too little for {config.model}; "
            "give --data"
        )
    if config.tokenizer == "byte" and not any(is_token_folder(name) for name, _ in parse_data(config.data)):
        raise UserError(
            f'tokenizer is "byte", whose 258 tokens are too few for {config.model}; give --tokenizer bpe:VOCABULARY or '
            "a folder with a tokenizer.json"
        )


def text_sources(config: PretrainConfig, data: str) -> list[tuple[DataSource, float]]:
    """The sources in `data`, each with its weight; a folder of tokens as its path."""
    return [
        (Path(name) if is_token_folder(name) else TextSource(name, config.template, config.skip_bad_lines), weight)
        for name, weight in parse_data(data)
    ]


def learnt_before(config: PretrainConfig, world: World) -> Tokenizer | None:
    """The tokenizer that the resumed run learned: learned again from changed data, it would differ.

    None if there is no run to resume. Raises UserError if `tokenizer` differs from that of the saved run.
    """
    if not (config.resume and config.tokenizer.startswith("bpe:")):
        return None
    newest = world.from_main(lambda: str(newest_checkpoint(Path(config.output)) or ""))
    if not newest:
        return None
    if (before := recorded_settings(config).get("tokenizer", config.tokenizer)) != config.tokenizer:
        raise UserError(
            f'tokenizer "{config.tokenizer}": the run was saved with "{before}" and keeps it; remove --tokenizer, or '
            "start over with --overwrite"
        )
    return load_tokenizer(newest)


def make_tokenizer(
    config: PretrainConfig, world: World, texts: Sequence[Iterable[str]], folders: Sequence[Path]
) -> Tokenizer:
    """`byte`, `bpe:VOCABULARY` trained on rank 0's texts, or a folder's; by default that of the model's folder, or that
    which the data was tokenized with."""
    folders = [Path(config.model)] if Path(config.model).is_dir() else list(folders)
    if config.tokenizer == "byte" and folders:
        return load_tokenizer(folders[0])
    if not config.tokenizer.startswith("bpe:"):
        return named_tokenizer(config.tokenizer, ())
    if not texts:
        raise UserError(f'tokenizer "{config.tokenizer}": the data is tokenized already; leave --tokenizer out')
    return learn_once(world, lambda: named_tokenizer(config.tokenizer, itertools.chain.from_iterable(texts)))


def make_loader(
    config: PretrainConfig,
    sources: Sequence[tuple[DataSource, float]],
    encoder: Encoder,
    world: World,
    kind: type[Rows] = Rows,
) -> RowLoader:
    """The loader of this rank's rows from the sources, mixed by their weights."""
    share = partial(read_once, world)
    rows = open_rows(sources, encoder, config.loader, config.sequence_length, config.seed, share, kind)
    tokens = config.train.tokens_per_microbatch
    return RowLoader(rows, config.tokens_per_step, tokens, world.data_rank, world.data_size)


def estimate_memory(config: PretrainConfig) -> DryRun:
    """A dry run of one of `config.dry_run` ranks; no data is read, so a preset has its family's vocabulary.

    Raises UserError for bad input.
    """
    from lockstep.train.dry_run import dry_run  # imports what shards a model, which one process never needs

    validate(config)
    config = replace(config, model=folder_if_model(config.model))
    folder = Path(config.model)
    shape = read_config(folder) if folder.is_dir() else preset(config.model)
    refuse_score_head(shape, config.model)
    check_length(config, shape)
    if config.lora.rank:
        shape = adapted(shape, config.lora, config.model)
    # The ranks are on other machines, so nothing is measured for them unless they are known to be CPUs.
    on_cpu = config.device == "cpu" or (config.dry_run == 1 and not config.device and not torch.cuda.is_available())
    dtype, why = recorded_settings(config).get("dtype", ""), "as the run began"
    if not is_auto(config.dtype) or not dtype:
        dtype, why = choose_dtype(config.dtype, config.model, torch.device("cpu" if on_cpu else "cuda"))
    loss = NextTokenLoss(config.train.tokens_per_microbatch)
    found = dry_run(replace(config, dtype=dtype), shape, config.dry_run, loss)  # type: ignore[arg-type]
    return replace(found, dtype=f"{dtype} (auto: {why})" if why else dtype)


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


def check_length(config: PretrainConfig, shape: ModelConfig) -> None:
    """Raises UserError if a row is longer than the model's context."""
    if config.sequence_length > shape.max_positions:
        raise UserError(
            f"sequence_length is {config.sequence_length}, but {config.model} has {shape.max_positions} positions; "
            f"give at most {shape.max_positions}"
        )


def make_model(
    config: PretrainConfig, tokenizer: Tokenizer, world: World, template: ChatTemplate | None = None
) -> TrainableModel:
    """This rank's part of a model with fresh weights, or of a folder's. Raises UserError if its rows are too long."""
    shape = model_shape(config, tokenizer, template)
    refuse_score_head(shape, config.model)
    check_length(config, shape)
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
    kind = resolve_dtype(config.dtype)
    return parallel_model(shape, kind, world, config.parallel, config.compile, fill, config.recompute)
