"""A run's rows for training and validation, read on rank 0 and sent to every rank, and how many steps they are."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from lockstep.config import PretrainConfig, SFTConfig
from lockstep.data import (
    DataSource,
    Encoder,
    RowLoader,
    StepRows,
    TokenizedCorpus,
    Tokenizer,
    divide,
    load_tokenizer,
    open_rows,
)
from lockstep.data.loader import step_rows
from lockstep.data.rows import Piece, Rows
from lockstep.errors import UserError
from lockstep.observe import announce, in_short
from lockstep.parallel import World

ARRAYS = ("tokens", "offsets", "scored", "branches")
"""The arrays of a corpus that are sent."""


def read_once(world: World, read: Callable[[], TokenizedCorpus | None]) -> TokenizedCorpus | None:
    """What `read` returns on rank 0. If it fails there, the other ranks raise UserError with the same message."""
    if world.mesh is None:
        return read()
    corpus: TokenizedCorpus | None = None

    def counts() -> tuple[list[str], dict[str, int]] | None:
        nonlocal corpus
        corpus = read()
        if corpus is None:
            return None
        return [name for name in ARRAYS if getattr(corpus, name) is not None], corpus.counts

    described = world.from_main(counts)
    if described is None:
        return None
    names, corpus_counts = described
    local = [] if corpus is None else [getattr(corpus, name).reshape(-1) for name in names]
    arrays = dict(zip(names, world.arrays_from_main(local)))
    if "branches" in arrays:
        arrays["branches"] = arrays["branches"].reshape(-1, 2)
    return TokenizedCorpus(**arrays, counts=corpus_counts)


def learn_once(world: World, learn: Callable[[], Tokenizer]) -> Tokenizer:
    """The tokenizer that `learn` returns on rank 0, sent as its saved files; errors as in `read_once`."""
    if world.mesh is None:
        return learn()

    def saved() -> dict[str, str]:
        with tempfile.TemporaryDirectory() as folder:
            learn().save(folder)
            return {path.name: path.read_text(encoding="utf-8") for path in Path(folder).iterdir()}

    files = world.from_main(saved)
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        return load_tokenizer(folder)


Sources = Sequence[tuple[DataSource, float]]
"""Sources of data, each with its weight."""


def run_rows(
    config: PretrainConfig, sources: Sources, held_out: Sources, encoder: Encoder, world: World, kind: type[Rows] = Rows
) -> tuple[RowLoader, StepRows | None]:
    """The loader of this rank's rows from the sources, and its share of those that every validation measures, if any:
    from `held_out`, or the sources' `validation_share`."""
    if config.validation_share:
        sources, held_out = divide(sources, config.validation_share)
    share = partial(read_once, world)
    rows = open_rows(sources, encoder, config.loader, config.sequence_length, config.seed, share, kind)
    tokens = config.train.tokens_per_microbatch
    loader = RowLoader(rows, config.tokens_per_step, tokens, world.data_rank, world.data_size)
    return loader, _validation_rows(config, held_out, encoder, world, kind) if held_out else None


def _validation_rows(
    config: PretrainConfig, sources: Sources, encoder: Encoder, world: World, kind: type[Rows]
) -> StepRows:
    """The same `validation_tokens` tokens each time, or all there are, for any number of ranks: micro-batches are
    filled up with rows without documents, since every rank must have equally many. Raises UserError for data without a
    target."""
    length = config.sequence_length
    share = partial(read_once, world)
    rows = open_rows(sources, encoder, replace(config.loader, repeat=False), length, seed=0, share=share, kind=kind)
    plans: list[list[Piece]] = []
    while not rows.ended and len(plans) < max(1, config.validation_tokens // length):
        plans.append(rows.plan())
    if not any(rows.targets(plan) for plan in plans):
        name = f"validation_data {config.validation_data}" if config.validation_data else "validation_share"
        raise UserError(f"{name}: contains nothing to predict; give other data")
    # A loss's bits depend on the micro-batches, which are the same in all layouts with `deterministic_layout`.
    most = len(plans) if config.train.deterministic_layout else -(-len(plans) // world.data_size)
    size = min(max(1, config.train.tokens_per_microbatch // length), most)
    padded = plans + [[]] * (-len(plans) % (size * world.data_size))
    return step_rows(rows, padded, size, world.data_rank, world.data_size)


Config = TypeVar("Config", bound=SFTConfig)


def with_steps(config: Config, loader: RowLoader, world: World, examples: str) -> Config:
    """`config` with as many `steps` as its `epochs` take, unless it has steps; announces how much data they are.

    examples: what the data consists of, in the plural. Raises UserError for epochs of a stream.
    """
    size = loader.rows.size
    if size is None:
        if not config.steps:
            raise UserError(
                f"{config.data}: the length of a stream is unknown, so epochs cannot be counted; give --steps"
            )
        return config
    if not config.steps:
        config = replace(config, steps=loader.steps_of(config.epochs))
    if world.is_main:
        epochs, (count, tokens) = loader.epochs_of(config.steps), size
        announce(
            f"data: {count:,} {examples} of {in_short(tokens)} tokens; {config.steps:,} "
            f"step{'s' * (config.steps != 1)} of up to {in_short(config.tokens_per_step)} tokens "
            f"{'is' if config.steps == 1 else 'are'} {epochs:.3g} epoch{'s' * (epochs != 1)}"
        )
    return config
