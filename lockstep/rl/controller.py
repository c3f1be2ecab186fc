"""A reinforcement run, top to bottom: sample, grade, compare, update, observe."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from lockstep.checkpoint import Checkpoints
from lockstep.config import RLConfig, algorithm_of, to_toml, validate
from lockstep.data import load_tokenizer
from lockstep.generate import Engine
from lockstep.model import arithmetic_of, load_model, open_device
from lockstep.observe import (
    Observer,
    OnMetrics,
    Progress,
    announce,
    claim_run,
    in_short,
    log,
    read_metrics,
    require_observers,
    start_line,
    write_report,
)
from lockstep.parallel import World, apply_compile, refuse_ranks
from lockstep.rl.batch import PolicyLoss, policy_batches
from lockstep.rl.bookkeeping import Stopwatch, accepted, due, rollout_metrics, summarize, validation_metrics
from lockstep.rl.collect import assign_advantages, assign_rewards, charge_overlong, collect, evaluate
from lockstep.rl.conversations.rendering import open_rendering
from lockstep.rl.environment import Environment
from lockstep.rl.ledger import Ledger
from lockstep.rl.load_environment import load_environment
from lockstep.rl.prompts import PromptLoader, examples_of
from lockstep.rl.reference import (
    assign_reference_scores,
    assign_teacher_scores,
    load_reference,
    load_teacher,
    moving_average,
)
from lockstep.rl.rewards.workers import open_grader
from lockstep.rl.rollouts import write_rollouts
from lockstep.train import Trainer
from lockstep.train.bad_steps import BadSteps
from lockstep.train.settle import settle
from lockstep.train.stop_signal import StopSignal
from lockstep.train.threads import fitting_threads

SILENT_STEPS = 10
NOTHING_LEARNT = (
    "in %d steps in a row all completions of each prompt had the same reward, so nothing was learnt: "
    "the task is too hard or too easy, or its reward is wrong; rollouts/ shows the completions"
)


def reinforce(
    config: RLConfig,
    environment: Environment | None = None,
    progress: Progress | None = None,
    on_metrics: OnMetrics | None = None,
) -> Path:
    """Trains `config.model` on `environment`, or the one that `config` names; returns the run's folder.

    Calls `on_metrics(step, metrics)` after the validation before the first step (step 0) and after every step. Raises
    UserError for bad input, ParityError where trainer and generator disagree (unless set to warn), and RunStopped where
    the run ends early.
    """
    with ExitStack() as opened:
        return _reinforce(config, environment, progress, on_metrics, opened)


def _reinforce(
    config: RLConfig,
    environment: Environment | None,
    progress: Progress | None,
    on_metrics: OnMetrics | None,
    opened: ExitStack,
) -> Path:
    """The run; `opened` closes its folder after it."""
    validate(config)
    refuse_ranks("rl")
    device = open_device(config.device)
    config = settle(config, World(device))
    algorithm = algorithm_of(config)
    others = algorithm.advantage == "teacher" or algorithm.kl_coefficient > 0 or algorithm.entropy_coefficient > 0
    learns_from_rewards_alone = not others
    is_given = environment is not None
    environment = environment or load_environment(config.environment, config.data, config.skip_bad_lines)
    prompts = PromptLoader(examples_of(environment, "train"), config.seed)
    held_out = examples_of(environment, "validation")[: config.validation_examples]
    model = load_model(config.model, config.dtype, device)
    apply_compile(model, config.compile)
    tokenizer = load_tokenizer(config.model, model.config.vocab_size)
    reference = load_reference(config, model, tokenizer)
    teacher = load_teacher(config, model, tokenizer)
    rendering = open_rendering(config, environment, tokenizer, model)
    # The engine samples from the very tensors that the trainer's forward reads; no weight is ever copied.
    engine = Engine(model, config.engine, tokenizer)
    trainer = Trainer(model, config.train, config.steps * config.inner_steps)
    average = moving_average(config, reference, trainer)

    require_observers(config.observe, model.device)
    run = opened.enter_context(claim_run(config.output, to_toml(config), config.resume, config.overwrite))
    checkpoints = Checkpoints(run.path, trainer, tokenizer, config)
    start = 0
    if config.resume and (state := checkpoints.resume(lambda state: prompts.restore(state["prompts"]))):
        start = state["step"]
        engine.weights_changed(start)
        if average:
            average.write()
    if config.resume:
        # Without a checkpoint the validation before the first step is made again, too.
        run.truncate(start or -1)
        run.record(to_toml(config))

    grader = opened.enter_context(open_grader(config, environment, is_given, run.path))
    samples = max(config.steps - start, 0) * config.prompts_per_step * config.samples_per_prompt
    task = type(environment).__name__
    work = f"{task}, {in_short(samples)} samples to go, of up to {config.max_new_tokens} tokens"
    announce("rl: " + start_line(config.model, model.config.num_parameters, device, model.dtype, work))
    if device.type == "cuda" and (count := torch.cuda.device_count()) > 1:
        announce(f"rl uses one GPU so far: {device} of {count}; --device chooses another")
    clock, silent_steps = time.perf_counter(), 0
    bad_steps = BadSteps(config.faults, run.path, tokenizer)
    with (
        fitting_threads(model.config, config.train.tokens_per_microbatch),
        StopSignal(config.faults.stop_seconds) as stop,
        checkpoints,
        Observer(config.observe, config.faults, run.path, on_metrics=on_metrics) as observer,
        progress or Progress("rl", config.steps, "step") as bar,
    ):
        trainer.timeline = observer.timeline
        bar.advance(min(start, config.steps))
        if start and start >= config.steps:
            log.warning("the run has come to its end at step %d; give more --steps to go on", start)
        if start == 0:
            validation = evaluate(held_out, environment, engine, tokenizer, config, grader, rendering)
            write_rollouts(run.validation_path(0), validation)
            observer.write(0, validation_metrics(validation, environment))
        for step in range(start + 1, config.steps + 1):
            with observer.step(step):
                stopwatch = Stopwatch(observer.timeline)
                ledger = Ledger(config.prompts_per_step)
                for extra_round in range(algorithm.extra_rounds + 1):
                    asked = prompts.next(ledger.missing)
                    drawn = collect(asked, environment, engine, tokenizer, config, step, extra_round, rendering)
                    stopwatch.lap("time/generate")
                    assign_rewards(drawn, environment, config.rewards, grader)
                    stopwatch.lap("time/reward")
                    ledger.add(drawn)
                    ledger.drop_failed()
                    if algorithm.extra_rounds or algorithm.advantage == "best":
                        ledger.drop_equal_rewards()
                    if not ledger.missing:
                        break
                ledger.keep_some()
                charge_overlong(ledger.rollouts, config.max_new_tokens, algorithm.overlong_share)
                if reference:
                    assign_reference_scores(ledger.trained, reference, config)
                if teacher:
                    assign_teacher_scores(ledger.trained, teacher, config)
                assign_advantages(ledger.trained, algorithm)
                if algorithm.advantage == "best":
                    ledger.drop(lambda rollout: rollout.advantage == 0, "not_best")
                    ledger.keep_some()
                batches = policy_batches(ledger.trained, config, device)
                metrics: dict[str, float] = {}
                for inner in range(config.inner_steps):
                    loss = PolicyLoss(config, compare=inner == 0)
                    metrics |= trainer.step(batches, loss) | loss.metrics()
                    bad_steps.check(step, trainer)
                    if inner == 0:
                        metrics |= accepted(loss.parity, config, step, model).metrics()
                        metrics["policy/ratio_first_max"] = loss.ratio_max
                if average:
                    average.update()
                stopwatch.lap("time/train")
                engine.weights_changed(step)
                stopwatch.lap("time/weight_sync")

                given = (rollout for batch in batches for rollout in batch.rollouts)
                metrics |= rollout_metrics(ledger.rollouts) | ledger.metrics(given) | stopwatch.metrics()
                metrics["rollout/tokens_per_second"] = metrics["rollout/tokens"] / metrics["time/generate"]
                if due(step, config.validation_every, config.steps):
                    validation = evaluate(held_out, environment, engine, tokenizer, config, grader, rendering)
                    write_rollouts(run.validation_path(step), validation)
                    metrics |= validation_metrics(validation, environment)
                silent = learns_from_rewards_alone and metrics["reward/groups_without_spread"] == 1
                silent_steps = silent_steps + 1 if silent else 0
                if silent_steps == SILENT_STEPS:
                    log.warning(NOTHING_LEARNT, silent_steps)
                observer.write(step, metrics)
                stopped_by = stop.agreed(trainer.world)
                write_rollouts(run.rollouts_path(step), ledger.rollouts)
                if stopped_by or checkpoints.due(step):
                    checkpoints.save(step, {"prompts": prompts.state()}, last=step == config.steps)
            bar.advance(reward=metrics["reward/mean"], different=metrics["parity/tokens_different"])
            if stopped_by and step < config.steps:
                raise stop.error(stopped_by, step, config.output)

    if start < config.steps or not run.summary.is_file():
        summary = summarize(read_metrics(run.metrics), config.inner_steps) | {
            "seconds": {"rl": time.perf_counter() - clock},
            "arithmetic": arithmetic_of(device),
        }
        run.summary.write_text(json.dumps(summary, indent=1))
        write_report(run.path, f"{config.algorithm} on {config.environment}")
    return run.path
