"""A pretraining run on text, top to bottom."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

from lockstep.checkpoint import newest_checkpoint
from lockstep.config import PretrainConfig, validate_run
from lockstep.data import (
    DataSource,
    TextEncoder,
    TextSource,
    Tokenizer,
    is_token_folder,
    load_tokenizer,
    named_tokenizer,
    parse_data,
    tokenize_documents,
)
from lockstep.errors import UserError
from lockstep.hub import is_local, is_model, named_path
from lockstep.model import preset
from lockstep.observe import OnMetrics
from lockstep.parallel import World
from lockstep.progress import Progress
from lockstep.train.resolve_defaults import recorded_settings
from lockstep.train.rows import Sources, learn_once, read_once, run_rows
from lockstep.train.rows_task import RowsRun, train_rows
from lockstep.train.setup import make_model, training_world

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
    metrics)` after every step: an exception that it raises ends the run once that step is saved, `lockstep.StopRun`
    without an error. Raises UserError for bad input.
    """
    validate_run(config, PretrainConfig)
    if documents is None:
        _refuse_toy_data(config)
    with training_world(config) as (config, world):
        sources = _text_sources(config, config.data) if documents is None else []
        held_out_sources = _text_sources(config, config.validation_data) if config.validation_data else []
        tokenizer = _open_tokenizer(config, world, sources, documents)
        model = make_model(config, tokenizer, world)
        if documents is not None:
            corpus = read_once(world, lambda: tokenize_documents(documents, tokenizer, config.skip_bad_lines))
            assert corpus is not None
            sources = [(corpus, 1.0)]
        loader, held_out = run_rows(config, sources, held_out_sources, TextEncoder(tokenizer), world)
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


def _text_sources(config: PretrainConfig, data: str) -> list[tuple[DataSource, float]]:
    """The sources in `data`, each with its weight; a folder of tokens as its path."""
    return [
        (Path(name) if is_token_folder(name) else TextSource(name, config.template, config.skip_bad_lines), weight)
        for name, weight in parse_data(data)
    ]


def _open_tokenizer(
    config: PretrainConfig,
    world: World,
    sources: Sources,
    documents: Iterable[str] | None,
) -> Tokenizer:
    """The tokenizer that a resumed run learned, or else the one that the settings name."""
    if (learned := _learned_before(config, world)) is not None:
        return learned
    texts = [source for source, _ in sources if isinstance(source, TextSource)] if documents is None else [documents]
    folders = [source for source, _ in sources if isinstance(source, Path)]
    return _make_tokenizer(config, world, texts, folders)


def _learned_before(config: PretrainConfig, world: World) -> Tokenizer | None:
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


def _make_tokenizer(
    config: PretrainConfig, world: World, texts: Sequence[Iterable[str]], folders: Sequence[Path]
) -> Tokenizer:
    """`byte`, `bpe:VOCABULARY` trained on rank 0's texts, or a folder's; by default the model folder's, or the one that
    the data was tokenized with."""
    folders = [named_path(config.model)] if is_local(config.model) else list(folders)
    if config.tokenizer == "byte" and folders:
        return load_tokenizer(folders[0])
    if not config.tokenizer.startswith("bpe:"):
        return named_tokenizer(config.tokenizer, ())
    if not texts:
        raise UserError(f'tokenizer "{config.tokenizer}": the data is tokenized already; leave --tokenizer out')
    return learn_once(world, lambda: named_tokenizer(config.tokenizer, itertools.chain.from_iterable(texts)))
