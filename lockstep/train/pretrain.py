"""A pretraining run on text, top to bottom."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep.checkpoint import folder_if_model, newest_checkpoint
from lockstep.checkpoint.checkpoints import Checkpoints
from lockstep.config import PretrainConfig, SFTConfig, to_toml, validate, validate_run
from lockstep.data import (
    DataSource,
    Encoder,
    RowLoader,
    Rows,
    StepRows,
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
    Decoder,
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
    Observer,
    OnMetrics,
    Progress,
    RunFolder,
    announce,
    awaits_validation,
    claim_run,
    in_short,
    log,
    merge_timelines,
    read_metrics,
    require_observers,
    start_line,
    write_report,
)
from lockstep.parallel import Pipeline, World, close_world, open_world, parallel_model
from lockstep.train.adapter import adapted
from lockstep.train.answers import Answers
from lockstep.train.bad_steps import BadSteps
from lockstep.train.loss_spikes import LossSpikes
from lockstep.train.objective import NextToken, NextTokenLoss, Objective
from lockstep.train.read_once import learn_once, read_once
from lockstep.train.resolve_defaults import recorded_settings, refuse_fewer_steps, resolve_defaults
from lockstep.train.stop_signal import Interrupted, StopSignal, ends_with_error
from lockstep.train.threads import fitting_threads
from lockstep.train.throughput import Throughput
from lockstep.train.trainer import Trainer
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
    return run_training(config, world, tokenizer, model, loader, progress, held_out=held_out, on_metrics=on_metrics)


def run_training(
    config: PretrainConfig,
    world: World,
    tokenizer: Tokenizer,
    model: TrainableModel,
    loader: RowLoader,
    progress: Progress | None = None,
    command: str = "pretrain",
    held_out: StepRows | None = None,
    on_metrics: OnMetrics | None = None,
    answers: Answers | None = None,
    objective: Objective | None = None,
    extra_parameters: Mapping[str, nn.Parameter] | None = None,
) -> Path:
    """The loop of every run on a loader's rows, from its last checkpoint if it resumes; returns the run's folder.

    `held_out`: the rows for validation; `answers`: the model's answers before and after, for the report. `objective`:
    by default next-token prediction. `extra_parameters`: as in `Trainer`. Raises RunStopped if the run
    ends early, because of a signal or bad steps.
    """
    require_observers(config.observe, world.device)
    if isinstance(model, Pipeline):
        model.plan.check_microbatches(loader.microbatches)
    trainer = Trainer(model, config.train, config.steps, world, extra_parameters)
    objective = objective or NextToken()
    claimed = claim_run(config.output, to_toml(config), config.resume, config.overwrite)
    with ExitStack() as opened:
        world.on_main(lambda: opened.enter_context(claimed))
        return _train(config, trainer, tokenizer, loader, progress, command, held_out, on_metrics, answers, objective)


def _train(
    config: PretrainConfig,
    trainer: Trainer,
    tokenizer: Tokenizer,
    loader: RowLoader,
    progress: Progress | None,
    command: str,
    held_out: StepRows | None,
    on_metrics: OnMetrics | None,
    answers: Answers | None,
    objective: Objective,
) -> Path:
    """The loop, in an open folder."""
    world, model, run = trainer.world, trainer.model, RunFolder(Path(config.output))
    checkpoints = Checkpoints(run.path, trainer, tokenizer, config)
    spikes = LossSpikes(config.faults)
    start, validation_pending = 0, False
    objective.prepare(trainer, loader, held_out)

    def restore(state: dict[str, Any]) -> None:
        loader.load_state(state["loader"])
        spikes.load_state(state.get("losses", ()))

    if config.resume and (state := checkpoints.resume(restore)):
        start, validation_pending = state["step"], held_out is not None and state.get("unjudged", False)
        refuse_fewer_steps(config, start)
    if config.resume and world.is_main:
        run.truncate(start)
        run.record(to_toml(config))
    before = world.from_main(lambda: read_metrics(run.metrics)[-1:]) if validation_pending else []
    validation_pending = awaits_validation(before, start)

    compute = resolve_dtype(config.dtype)
    tokens = (config.steps - start) * config.tokens_per_step
    work = f"{in_short(tokens)} tokens to go, {in_short(config.tokens_per_step)} per step"
    announce(f"{command}: " + start_line(config.model, model.config, world.device, compute, work, world.size))
    began = time.perf_counter()
    speed = Throughput(model.config, world, compute)
    bad_steps = BadSteps(config.faults, run.path, tokenizer)
    metrics: dict[str, float] = {}
    stopped_by = 0
    threads = fitting_threads(model.config, config.train.tokens_per_microbatch)
    with threads, StopSignal(config.faults.stop_seconds, lambda: checkpoints.newest) as stop, checkpoints:
        with (
            Observer(
                config.observe, config.faults, run.path, world.rank, world.size, stop.guarding(on_metrics)
            ) as observer,
            (progress or Progress(command, config.steps, "step")) if world.is_main else nullcontext() as bar,
        ):
            timeline = trainer.timeline = observer.timeline
            if bar is not None:
                bar.advance(start)

            def validate(step: int, last: bool) -> dict[str, float] | None:
                """None if a signal interrupts it."""
                assert held_out is not None
                # No run resumes from a checkpoint with only the model.
                ends = last and config.checkpoint.last_model_only
                asking = nullcontext() if ends else trainer.asking(*stop.ending(world))
                with suppress(Interrupted), asking:
                    found = objective.validate(trainer, held_out)
                    if bar is not None:
                        bar.validated(step, found)
                    return found
                return None

            def update(batch: StepRows) -> dict[str, float] | None:
                """None if a signal interrupts it, which leaves weights and optimizer as they were."""
                with suppress(Interrupted), trainer.asking(*stop.ending(world, late=True)):
                    return objective.step(trainer, batch)
                return None

            is_over = start >= config.steps or loader.ended
            made_up = False
            if validation_pending and (found := validate(start, is_over)) is not None:
                validation_pending, made_up = False, True
                observer.extend(before[0], found)
                metrics = before[0] | found
            elif start and is_over and not validation_pending:
                ended = "the end of its data" if loader.ended else f"step {start}"
                log.warning(
                    "the run has finished at %s; to continue, give more --steps or, "
                    "from its weights, --model %s and another --output",
                    ended,
                    run.path,
                )
            if answers is not None and isinstance(model, Decoder) and start == 0:
                answers.write(0, model)
            if config.steps == 0:
                checkpoints.save(0, {"loader": loader.state()}, last=True)
            step = start
            stopped_by = stop.agreed(world)
            while step < config.steps and not loader.ended and not stopped_by:
                step += 1
                with observer.step(step):
                    before_step = {"loader": loader.state(), "losses": spikes.state()}
                    with timeline.span("data"):
                        batch = loader.next()
                    if (updated := update(batch)) is None:
                        step, stopped_by = step - 1, stop.agreed(world)
                        checkpoints.wait()
                        if step and checkpoints.newest != step:
                            checkpoints.save(step, before_step)
                        break
                    metrics = updated
                    bad_steps.check(step, trainer, batch)
                    metrics |= speed.metrics(batch, timeline) | loader.counts | {"epoch": loader.epoch}
                    last = step == config.steps or loader.ended
                    validation_pending = False
                    if held_out is not None and (last or step % config.validation_every == 0):
                        found = validate(step, last)
                        validation_pending = found is None
                        metrics |= found or {}
                    observer.write(step, metrics)
                    stopped_by = stop.agreed(world)
                    trainer.balance.write(run.expert_load, step)
                    # The loader is not rolled back: it continues with the data after the spike, if there is any.
                    spike = spikes.found(step, metrics["loss"]) and not loader.ended
                    if spike and (state := spikes.roll_back(checkpoints)):
                        step = state["step"]
                        observer.rewind(step)
                    elif last or stopped_by or checkpoints.due(step):
                        with timeline.span("checkpoint"):
                            state = {"loader": loader.state(), "losses": spikes.state(), "data_ended": loader.ended}
                            checkpoints.save(step, state | {"unjudged": validation_pending}, last)
                if loader.ended and step < config.steps:
                    log.warning("the data ended after step %d of %d (loader.repeat is off)", step, config.steps)
                if bar is not None:
                    shown = {"loss": metrics["loss"], "tokens_per_s": metrics["tokens_per_second"]}
                    bar.reach(step, "", **shown | observer.for_terminal(metrics))

            if answers is not None and isinstance(model, Decoder) and (step > start or made_up) and not stopped_by:
                answers.write(step, model)
        # The last checkpoint may still be being written.
        world.barrier()
        # A run that had already finished keeps its summary.
        if world.is_main and (metrics or not run.summary.is_file()):
            merge_timelines(run.path)
            metrics = metrics or (read_metrics(run.metrics) or [{}])[-1]
            summary = {
                "loss": metrics.get("loss"),
                "validation_loss": metrics.get("validation/loss"),
                "seconds": {command: time.perf_counter() - began},
            } | ({"resumed_from": start} if start else {})
            run.write_summary(summary)
        if world.is_main and run.lacks_report:
            write_report(run.path, f"{command} {config.model}")
    if ends_with_error(stopped_by, finished=step >= config.steps and not validation_pending):
        raise stop.error(stopped_by, step, config.output)
    return run.path


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
