"""A reinforcement run, from its settings to its report."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from lockstep.checkpoint.random_state import seed_generators
from lockstep.config import RLConfig, validate_run
from lockstep.observe import OnMetrics
from lockstep.parallel import close_world, open_world
from lockstep.progress import Progress
from lockstep.rl.alarms import Alarms
from lockstep.rl.environments.loading import require_environment
from lockstep.rl.environments.protocol import Environment
from lockstep.rl.generators.open import open_generators, resolve_generator_settings
from lockstep.rl.own_functions import record_functions
from lockstep.rl.rollouts.prefetcher import RolloutPrefetcher
from lockstep.rl.rollouts.replicas import Replicas
from lockstep.rl.rollouts.sampling import RolloutReplay, Sampling, open_graders
from lockstep.rl.scoring.value_head import train_settings
from lockstep.rl.setup import (
    RunParts,
    announce_start,
    learns_from_spread_alone,
    load_parts,
    named_environment,
    summary_of,
    title_of,
)
from lockstep.rl.task import PolicyTask
from lockstep.run.loop import run_steps
from lockstep.run.session import Session
from lockstep.train import Trainer
from lockstep.train.resolve_defaults import resolve_defaults


def reinforce(
    config: RLConfig,
    environment: Environment | None = None,
    progress: Progress | None = None,
    on_metrics: OnMetrics | None = None,
) -> Path:
    """Trains `config.model` on `environment`, or the one that `config` names; returns the run's folder.

    Calls `on_metrics(step, metrics)` after the validation before the first step (step 0) and after every step: an
    exception that it raises ends the run once that step is saved, `lockstep.StopRun` without an error. Raises UserError
    for bad input, ParityError if trainer and generator disagree (unless set to warn), and RunStopped if the run ends
    early.
    """
    return _reinforce(config, environment, progress, on_metrics)


def replay_step(config: RLConfig, environment: Environment | None, step: int, recorded: RolloutReplay | None) -> None:
    """Computes only `step`, from the checkpoint before it in `config.output`, and writes metrics and rollouts there.

    Its rollouts are those of `recorded`, or sampled again if that is None. No validation, no checkpoint. Raises as
    `reinforce`.
    """
    _reinforce(config, environment, Progress("replay", step, "step"), None, step, recorded)


def _reinforce(
    config: RLConfig,
    environment: Environment | None,
    progress: Progress | None,
    on_metrics: OnMetrics | None,
    only_step: int = 0,
    recorded: RolloutReplay | None = None,
) -> Path:
    """The run, or `only_step` one step of it."""
    validate_run(config, RLConfig)
    is_given = environment is not None
    if environment is None:
        require_environment(config.environment)
    world = open_world(config.parallel, config.device)
    with ExitStack() as opened:
        opened.callback(close_world, world)
        config = resolve_defaults(resolve_generator_settings(config, world), world)
        seed_generators(config.seed)
        config, environment = named_environment(config, environment)
        parts = load_parts(config, environment, is_given, world)
        extra_parameters = parts.value_head.parameters_by_name() if parts.value_head else {}
        updates = config.steps * config.updates_per_batch
        trainer = Trainer(parts.policy, train_settings(config), updates, world, extra_parameters)
        session = Session(config, trainer, parts.tokenizer, "rl", progress, on_metrics, only_step)
        with session:
            world.on_main(lambda: record_functions(session.run.path, parts.functions))
            task = _open_task(config, parts, trainer, session, recorded)
            session.resume(task)
            task.start(session.start)
            task.observers.append(Alarms(config.alarms, session.history(), learns_from_spread_alone(config)))
            announce_start(config, parts.environment, parts.policy, parts.tokenizer, world, session.start)
            with session.running():
                run_steps(task, session)
            return session.finish(
                task,
                title_of(config),
                lambda: summary_of(config, session.run, world, parts.prompts.shared(parts.held_out)),
                task.generators.trace_events,
            )


def _open_task(
    config: RLConfig, parts: RunParts, trainer: Trainer, session: Session, recorded: RolloutReplay | None
) -> PolicyTask:
    """Opens what samples, which the session closes."""
    world, timeline, opened = session.world, session.timeline, session.opened
    # In one process the engine samples from the very tensors that the trainer's forward reads.
    generators = open_generators(config, world, parts.policy, parts.tokenizer, session.run.path, opened, timeline.moved)
    timeline.counters.append(lambda: generators.progress)
    # Closed after the graders: what still samples may be waiting for a conversation that they run.
    sampled_ahead = opened.enter_context(ExitStack())
    graders = open_graders(config, parts.environment, parts.is_given, session.run.path, timeline, opened)
    replicas = Replicas(world, config.actors.separate)
    sampling = Sampling(
        config, parts.environment, parts.rendering, generators, replicas, graders, session.stop, recorded
    )
    prefetcher = RolloutPrefetcher(
        sampling,
        parts.prompts,
        generators.sampler,
        config.prompts_per_step,
        config.actors.max_staleness,
        generators.caching_sampler,
        config.oversampling_factor,
    )
    sampled_ahead.callback(prefetcher.close)
    return PolicyTask(config, parts, trainer, generators, sampling, prefetcher, session)
