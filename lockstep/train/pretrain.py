"""A next-token run on text, top to bottom."""

from __future__ import annotations

import itertools
import json
import resource
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from torch import Tensor

from lockstep.checkpoint import Checkpoints
from lockstep.config import PretrainConfig, to_toml, validate
from lockstep.data import (
    DataSource,
    Encoder,
    RowLoader,
    TextEncoder,
    TextSource,
    Tokenizer,
    divide_step,
    is_token_folder,
    load_tokenizer,
    named_tokenizer,
    open_rows,
    parse_data,
    tokenize_documents,
)
from lockstep.errors import UserError
from lockstep.model import Decoder, initialize, load_weights, preset, read_config, resolve_dtype
from lockstep.observe import MetricsWriter, Progress, RunFolder, open_run, write_report
from lockstep.parallel import World, close_world, open_world, parallel_model
from lockstep.train.context import shard_row
from lockstep.train.packing import PackedRow, pack_rows, target_log_prob_sum
from lockstep.train.trainer import Trainer


def pretrain(config: PretrainConfig, documents: Iterable[str] | None = None, progress: Progress | None = None) -> Path:
    """Trains `config.model` on `config.data`, or on `documents` where given; returns the run's folder.

    Under torchrun all ranks call it and rank 0 writes. Raises UserError for bad input.
    """
    validate(config)
    world = open_world(config.parallel, config.device)
    try:
        return _pretrain(config, world, documents, progress)
    finally:
        close_world(world)


def _pretrain(config: PretrainConfig, world: World, documents: Iterable[str] | None, progress: Progress | None) -> Path:
    divide_step(config.sequence_length, config.tokens_per_step, config.train.tokens_per_microbatch, world.data_size)
    sources: list[tuple[DataSource, float]] = [] if documents is not None else text_sources(config)
    texts = [source for source, _ in sources if isinstance(source, TextSource)] if documents is None else [documents]
    tokenizer = make_tokenizer(config, texts, [source for source, _ in sources if isinstance(source, Path)])
    model = make_model(config, tokenizer, world)
    if documents is not None:
        sources = [(tokenize_documents(documents, tokenizer, config.skip_bad_lines), 1.0)]
    loader = make_loader(config, sources, TextEncoder(tokenizer), world)
    return run_training(config, world, tokenizer, model, loader, progress)


def run_training(
    config: PretrainConfig,
    world: World,
    tokenizer: Tokenizer,
    model: Decoder,
    loader: RowLoader,
    progress: Progress | None = None,
    command: str = "pretrain",
) -> Path:
    """The loop of every run on a loader's rows, from its last checkpoint on where asked; returns the run's folder."""
    trainer = Trainer(model, config.train, config.steps, world)

    run = RunFolder(Path(config.output))
    if world.is_main:
        open_run(config.output, to_toml(config), resume=config.resume, overwrite=config.overwrite)
    world.barrier()
    checkpoints = Checkpoints(run.path, trainer, tokenizer, config)
    start = 0
    if config.resume and (state := checkpoints.resume()):
        start = state["step"]
        loader.load_state(state["loader"])
    if config.resume and world.is_main:
        run.truncate(start)

    began = time.perf_counter()
    loss = float("nan")
    with (
        checkpoints,
        MetricsWriter(run.path, config.tensorboard) if world.is_main else nullcontext() as metrics_file,
        (progress or Progress(command, config.steps)) if world.is_main else nullcontext() as bar,
    ):
        if bar is not None:
            bar.advance(start)
        for step in range(start + 1, config.steps + 1):
            if loader.ended:
                break
            step_began = time.perf_counter()
            batch = loader.next()
            microbatches = [shard_row(pack_rows(rows, world.device), world) for rows in batch.microbatches]
            metrics = trainer.step(microbatches, NextTokenLoss(batch.targets))
            seconds = time.perf_counter() - step_began
            loss = metrics["loss"]
            metrics |= {
                "tokens": batch.tokens,
                "tokens_per_second": batch.tokens / seconds,
                # 2 multiply-adds a weight forward, 4 backward; attention's own products are left out.
                "tflops": 6 * model.config.num_parameters * batch.tokens / seconds / 1e12,
                "memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
                "epoch": loader.epoch,
                "data/padding": 1 - batch.tokens / batch.capacity,
                **loader.counts,
                "time/step": seconds,
            }
            if metrics_file is not None:
                metrics_file.write(step, metrics)
            if checkpoints.due(step) or loader.ended:
                checkpoints.save(step, {"loader": loader.state()}, last=step == config.steps or loader.ended)
            if bar is not None:
                bar.advance(loss=loss, tokens_per_s=metrics["tokens_per_second"])

    if world.is_main:
        summary = {"loss": loss, "seconds": {command: time.perf_counter() - began}}
        (run.path / "summary.json").write_text(json.dumps(summary, indent=1))
        write_report(run.path, f"{command} {config.model}")
    return run.path


class NextTokenLoss:
    """Mean cross-entropy over a step's targets, a micro-batch's share at a time."""

    def __init__(self, targets: int):
        self.targets = max(targets, 1)

    def __call__(self, model: Decoder, row: PackedRow) -> Tensor:
        return target_log_prob_sum(model, row, -1.0 / self.targets)


def text_sources(config: PretrainConfig) -> list[tuple[DataSource, float]]:
    """What `config.data` names, each with its weight; a folder of tokens as its path."""
    return [
        (Path(data) if is_token_folder(data) else TextSource(data, config.template, config.skip_bad_lines), weight)
        for data, weight in parse_data(config.data)
    ]


def make_tokenizer(config: PretrainConfig, texts: Sequence[Iterable[str]], folders: Sequence[Path] = ()) -> Tokenizer:
    """`byte`, `bpe:VOCABULARY` trained on the texts, or a folder's; by default that of the model's folder, or the one
    that the data was tokenised with."""
    folders = [Path(config.model)] if Path(config.model).is_dir() else list(folders)
    if config.tokenizer == "byte" and folders:
        return load_tokenizer(folders[0])
    if config.tokenizer.startswith("bpe:") and not texts:
        raise UserError(f'tokenizer "{config.tokenizer}": the data is tokenised already; leave --tokenizer out')
    return named_tokenizer(config.tokenizer, itertools.chain.from_iterable(texts))


def make_loader(
    config: PretrainConfig, sources: Sequence[tuple[DataSource, float]], encoder: Encoder, world: World
) -> RowLoader:
    """This rank's rows of the sources, mixed by their weights."""
    rows = open_rows(sources, encoder, config.loader, config.sequence_length, config.seed)
    tokens = config.train.tokens_per_microbatch
    return RowLoader(rows, config.tokens_per_step, tokens, world.data_rank, world.data_size)


def make_model(config: PretrainConfig, tokenizer: Tokenizer, world: World) -> Decoder:
    """This rank's part of a preset with fresh weights and the tokenizer's vocabulary, or of a folder's model."""
    if Path(config.model).is_dir():
        shape = read_config(Path(config.model))
        if tokenizer.vocab_size > shape.vocab_size:
            raise UserError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, but {config.model} only {shape.vocab_size}"
            )
        fill = partial(load_weights, path=config.model)
    else:
        eos = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
        shape = preset(config.model, tokenizer.vocab_size, eos)
        fill = partial(initialize, seed=config.seed)
    return parallel_model(shape, resolve_dtype(config.dtype), world, config.parallel, config.compile, fill)
