"""A reinforcement run, top to bottom: sample, grade, compare, update, observe."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint import Checkpoints
from lockstep.checkpoint.random_state import seed_generators
from lockstep.config import RLConfig, algorithm_of, to_toml, validate
from lockstep.data import load_tokenizer
from lockstep.generate.sampler import Sampler
from lockstep.model import arithmetic_of, resolve_dtype
from lockstep.observe import (
    Observer,
    OnMetrics,
    Progress,
    RunFolder,
    Timeline,
    announce,
    claim_run,
    in_short,
    log,
    merge_timelines,
    read_metrics,
    require_observers,
    start_line,
    write_report,
)
from lockstep.parallel import close_world, open_world
from lockstep.rl.actors.generators import open_generators, suited_to_actors, whole_policy
from lockstep.rl.actors.models import policy_model, refuse_on_ranks
from lockstep.rl.actors.replicas import Replicas
from lockstep.rl.actors.shares import own_batches, share_findings, token_budget
from lockstep.rl.ahead import Ahead
from lockstep.rl.alarms import Alarms
from lockstep.rl.batch import PolicyLoss, packing_metrics, policy_batches
from lockstep.rl.bookkeeping import (
    Stopwatch,
    accepted,
    due,
    rollout_metrics,
    staleness_metrics,
    summarize,
    validation_metrics,
)
from lockstep.rl.collect import assign_advantages, assign_rewards, charge_overlong, collect, evaluate
from lockstep.rl.conversations.protocol import ConversationEnvironment
from lockstep.rl.conversations.rendering import open_rendering
from lockstep.rl.critic import assign_values, make_critic, refuse_run_without_values, train_settings, value_metrics
from lockstep.rl.environment import Environment, Example
from lockstep.rl.ledger import Ledger
from lockstep.rl.load_environment import GIVEN, check_environment, given_name, load_environment
from lockstep.rl.prompt_balance import prompt_balance, write_prompts
from lockstep.rl.prompts import PromptLoader, examples_of, refuse_other_examples
from lockstep.rl.reference import (
    assign_reference_scores,
    assign_teacher_scores,
    load_reference,
    load_teacher,
    moving_average,
)
from lockstep.rl.rewards import Outcome, refuse_too_many
from lockstep.rl.rewards.workers import open_grader, own_limit
from lockstep.rl.rollouts import Rollout, write_rollouts
from lockstep.train import Trainer
from lockstep.train.bad_steps import BadSteps
from lockstep.train.settle import settle
from lockstep.train.stop_signal import StopSignal
from lockstep.train.threads import fitting_threads

Draws = Callable[[Sequence[Example]], list[Rollout]]
"""Rollouts of these examples that were sampled before."""


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


def compute_again(config: RLConfig, environment: Environment | None, step: int, drawn: Draws | None) -> None:
    """Makes `step` alone, from the checkpoint before it in `config.output`: metrics and rollouts are written there.

    Its rollouts are those of `drawn`, or sampled again without. Nothing is validated or saved. Raises as `reinforce`.
    """
    with ExitStack() as opened:
        _reinforce(config, environment, Progress("replay", step, "step"), None, opened, step, drawn)


def _reinforce(
    config: RLConfig,
    environment: Environment | None,
    progress: Progress | None,
    on_metrics: OnMetrics | None,
    opened: ExitStack,
    only: int = 0,
    recorded: Draws | None = None,
) -> Path:
    """The run, or `only` one step of it; `opened` closes its folder after it."""
    validate(config)
    world = open_world(config.parallel, config.device)
    opened.callback(close_world, world)
    device = world.device
    config = settle(suited_to_actors(config, world), world)
    seed_generators(config.seed)
    algorithm = algorithm_of(config)
    others = (
        algorithm.advantage in ("teacher", "gae") or max(algorithm.kl_coefficient, algorithm.entropy_coefficient) > 0
    )
    learns_from_spread_alone = not others
    is_given = environment is not None
    if environment is not None:
        check_environment(environment)
        config = replace(config, environment=given_name(environment))
    else:
        environment = load_environment(config.environment, config.data, config.skip_bad_lines)
    prompts = PromptLoader(examples_of(environment, "train"), config.seed)
    held_out = examples_of(environment, "validation")[: config.validation_examples]
    refuse_on_ranks(config, environment, world)
    for split, examples in (("train", prompts.examples), ("validation", held_out)):
        refuse_other_examples(split, examples, world)
    model = policy_model(config, world)
    tokenizer = load_tokenizer(config.model, model.config.vocab_size)
    reference = load_reference(config, world, tokenizer)
    teacher = load_teacher(config, world, tokenizer)
    rendering = open_rendering(config, environment, tokenizer, model)
    replicas = Replicas(world, config.actors.separate)
    critic = make_critic(config, model)
    beside = critic.parameters_by_name() if critic else {}
    trainer = Trainer(model, train_settings(config), config.steps * config.inner_steps, world, beside)
    average = moving_average(config, reference, trainer)

    require_observers(config.observe, model.device)
    claimed, run = (
        claim_run(config.output, to_toml(config), config.resume, config.overwrite),
        RunFolder(Path(config.output)),
    )
    world.on_main(lambda: opened.enter_context(claimed))
    # In one process the engine samples from the very tensors that the trainer's forward reads.
    timeline = Timeline(world.rank, config.observe.timeline_steps)
    generators = open_generators(config, world, model, tokenizer, run.path, opened, timeline.moved)
    engine = generators.sampler
    timeline.counters.append(lambda: generators.progress)
    checkpoints = Checkpoints(run.path, trainer, tokenizer, config)
    start, under_way = 0, {}
    if config.resume and critic:
        refuse_run_without_values(run.path, config)
    if config.resume and (state := checkpoints.resume(lambda state: prompts.restore(state["prompts"]))):
        start, under_way = state["step"], state.get("ahead", {})
        if average:
            average.write()
    if config.resume and world.is_main:
        # Without a checkpoint the validation before the first step is made again, too.
        run.truncate(start or -1)
        run.record(to_toml(config))

    generators.new_weights(start)
    grader = opened.enter_context(open_grader(config, environment, is_given, run.path, timeline.moved))
    # Conversations of steps to come are held while this step's are graded, one step after the other.
    talks = isinstance(environment, ConversationEnvironment)
    conversing, talking = grader, threading.Lock()
    if talks and config.actors.max_staleness:
        conversing = opened.enter_context(open_grader(config, environment, is_given, run.path, timeline.moved))

    def draw(asked: Sequence[Example], step: int, extra_round: int, sampler: Sampler) -> list[Rollout]:
        if recorded:
            return recorded(asked)
        with talking if talks else nullcontext():
            own = replicas.own(asked)
            return collect(
                asked, environment, sampler, tokenizer, config, step, extra_round, rendering, conversing, own
            )

    count, depth = config.prompts_per_step, config.actors.max_staleness
    ahead = Ahead(draw, prompts, engine, count, depth, generators.remembering, not talks, recorded is not None)
    opened.callback(ahead.close)
    if under_way:
        ahead.restore(under_way)
    patience, everyone = own_limit(config.rewards, grader), "the other ranks" if world.size > 1 else ""
    # As long as there may be no generator at all.
    start_limit = config.actors.start_seconds if config.actors.separate else 0.0
    asked_of = "the generators" if config.actors.separate else ""

    def judge(step: int) -> dict[str, Any]:
        """Samples and grades the held-out examples; writes what came of them, and returns it in figures."""
        with timeline.span("validation", asked_of, max(patience, start_limit)):
            own = replicas.own(held_out)
            judged = evaluate(held_out, environment, engine, tokenizer, config, grader, rendering, own)
        with timeline.span("wait", everyone):
            validation, _ = replicas.everyones(held_out, judged)
        world.on_main(partial(write_rollouts, run.validation_path(step), validation))
        return validation_metrics(validation, environment)

    samples = max(config.steps - start, 0) * config.prompts_per_step * config.samples_per_prompt
    task = type(environment).__name__
    work = f"{task}, {in_short(samples)} samples to go, of up to {config.max_new_tokens} tokens"
    parameters, compute = model.config.num_parameters, resolve_dtype(config.dtype)
    announce("rl: " + start_line(config.model, parameters, device, compute, work, world.size))
    if device.type == "cuda" and (count := torch.cuda.device_count()) > world.size:
        announce(f"rl uses {world.size} of {count} GPUs; torchrun --nproc-per-node {count} -m lockstep rl … uses all")
    clock, title = time.perf_counter(), f"{config.algorithm} on {config.environment.removeprefix(GIVEN)}"
    # All ranks watch what rank 0 has written, and come to the same.
    watch = Alarms(config.alarms, world.from_main(lambda: read_metrics(run.metrics)), learns_from_spread_alone)
    bad_steps = BadSteps(config.faults, run.path, tokenizer)
    with (
        fitting_threads(model.config, config.train.tokens_per_microbatch),
        StopSignal(config.faults.stop_seconds) as stop,
        checkpoints,
        Observer(config.observe, config.faults, run.path, world.rank, world.size, on_metrics, timeline) as observer,
        (progress or Progress("rl", config.steps, "step")) if world.is_main else nullcontext() as bar,
    ):
        trainer.timeline = timeline
        if bar is not None:
            bar.advance(min(start, config.steps))
        if start and start >= config.steps:
            log.warning("the run has come to its end at step %d; give more --steps to go on", start)
        if start == 0 and not only:
            metrics = judge(0)
            observer.write(0, metrics | watch.enter(0, metrics))
        for step in range(start + 1, (only or config.steps) + 1):
            with observer.step(step):
                stopwatch = Stopwatch(timeline)
                ledger, outcomes = Ledger(config.prompts_per_step), list[Outcome]()
                ahead.begin(step, config.steps)
                for extra_round in range(algorithm.extra_rounds + 1):
                    stopwatch.begin("time/generate", asked_of, max(patience * talks, start_limit))
                    asked, drawn = ahead.drawn(step, extra_round, ledger.missing)
                    stopwatch.begin("time/reward", patience=patience)
                    graded = assign_rewards(drawn, environment, config.rewards, grader)
                    stopwatch.begin("time/wait", everyone)
                    drawn, graded = replicas.everyones(asked, drawn, graded)
                    outcomes += graded
                    timeline.message = f"{len(drawn)} rollouts, graded"
                    stopwatch.begin("time/train")
                    ledger.add(drawn)
                    ledger.drop_failed()
                    if algorithm.extra_rounds or algorithm.advantage == "best":
                        ledger.drop_equal_rewards()
                    if not ledger.missing:
                        break
                refuse_too_many(outcomes, config.rewards.failure_limit)
                ledger.keep_some()
                charge_overlong(ledger.rollouts, config.max_new_tokens, algorithm.overlong_share)
                if reference:
                    assign_reference_scores(ledger.trained, reference, config, replicas, timeline.moved)
                if teacher:
                    assign_teacher_scores(ledger.trained, teacher, config, replicas, timeline.moved)
                if critic:
                    assign_values(
                        ledger.trained, whole_policy(generators, model), critic, config, replicas, timeline.moved
                    )
                assign_advantages(ledger.trained, algorithm)
                if algorithm.advantage == "best":
                    ledger.drop(lambda rollout: rollout.advantage == 0, "not_best")
                    ledger.keep_some()
                batches = policy_batches(
                    ledger.trained, config, device, token_budget(ledger.trained, config, world), step - 1
                )
                share = own_batches(batches, world, model)
                metrics = packing_metrics(batches)
                generators.training_begins()
                for inner in range(config.inner_steps):
                    loss = PolicyLoss(config, compare=inner == 0, critic=critic)
                    stepped = trainer.step(share, loss)
                    share_findings(loss, batches, share, replicas)
                    metrics |= stepped | loss.metrics()
                    bad_steps.check(step, trainer)
                    if inner == 0:
                        metrics |= accepted(loss.parity, config, step, model).metrics()
                        metrics["policy/ratio_first_max"] = loss.ratio_max
                if average:
                    average.update()
                stopwatch.begin("time/weight_sync", asked_of, start_limit)
                generators.new_weights(step)
                timeline.message = f"weights of version {step}"
                stopwatch.end()

                given = (rollout for batch in batches for rollout in batch.rollouts)
                metrics |= rollout_metrics(ledger.rollouts) | ledger.metrics(given) | stopwatch.metrics()
                metrics |= staleness_metrics(ledger.trained, step) | generators.metrics()
                metrics |= value_metrics(ledger.trained) | ({"ranks": world.size} if world.size > 1 else {})
                metrics["rollout/tokens_per_second"] = metrics["rollout/tokens"] / metrics["time/generate"]
                if not only and due(step, config.validation_every, config.steps):
                    metrics |= judge(step)
                observer.write(step, metrics | watch.enter(step, metrics))
                stopped_by = stop.agreed(world)
                world.on_main(partial(write_rollouts, run.rollouts_path(step), ledger.rollouts))
                world.on_main(partial(write_prompts, run.prompts, step, ledger.places()))
                if not only and (stopped_by or checkpoints.due(step)):
                    if config.actors.on_update == "finish":
                        # What is half done would go on with weights that it would not have had.
                        with timeline.span("generate", asked_of, max(patience * talks, start_limit)):
                            ahead.wait()
                    state = {"prompts": prompts.state(), "ahead": world.from_main(ahead.state)}
                    with timeline.span("checkpoint"):
                        checkpoints.save(step, state, last=step == config.steps)
            if bar is not None:
                bar.advance(reward=metrics["reward/mean"], different=metrics["parity/tokens_different"])
            ending = stop.error(stopped_by, step, config.output) if stopped_by else watch.ending()
            if ending and step < config.steps:
                world.on_main(partial(write_report, run.path, title))
                raise ending

    # The last checkpoint may still be on its way to the disk.
    world.barrier()
    if world.is_main and not only and (start < config.steps or not run.summary.is_file()):
        merge_timelines(run.path, generators.trace_events())
        summary = summarize(read_metrics(run.metrics), config.inner_steps) | {
            "seconds": {"rl": time.perf_counter() - clock},
            "arithmetic": arithmetic_of(device),
        }
        if balance := prompt_balance(run.path):
            summary["prompts"] = asdict(balance)
            if balance.repeated or balance.lost:
                log.warning("%s; this is a bug of Lockstep", balance.text())
        run.summary.write_text(json.dumps(summary, indent=1))
        write_report(run.path, title)
    return run.path
