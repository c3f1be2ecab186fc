"""A reinforcement run, top to bottom: sample, grade, compare, update, observe."""

from __future__ import annotations

import time
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.checkpoint.checkpoints import Checkpoints
from lockstep.checkpoint.random_state import random_state, seed_generators, set_random_state
from lockstep.config import RLConfig, algorithm_of, to_toml, validate_run
from lockstep.data import load_tokenizer, with_ends
from lockstep.data.chat import load_chat_template
from lockstep.hub import local_folder
from lockstep.observe import (
    Observer,
    OnMetrics,
    Progress,
    RunFolder,
    Timeline,
    append_step,
    awaits_validation,
    claim_run,
    read_metrics,
    require_observers,
    write_report,
)
from lockstep.parallel import close_world, open_world
from lockstep.rl.alarms import PREFIX, Alarms
from lockstep.rl.conversations.rendering import open_rendering
from lockstep.rl.environments.loading import require_environment
from lockstep.rl.environments.protocol import Environment
from lockstep.rl.generators.colocated import open_generators, suited_to_actors
from lockstep.rl.generators.models import policy_model
from lockstep.rl.grading import Outcome, refuse_too_many
from lockstep.rl.rollouts.advantages import assign_advantages
from lockstep.rl.rollouts.ledger import Ledger
from lockstep.rl.rollouts.metrics import (
    Stopwatch,
    due,
    rollout_metrics,
    staleness_metrics,
    validation_metrics,
)
from lockstep.rl.rollouts.packing import packing_metrics, packing_of, policy_batches
from lockstep.rl.rollouts.prefetcher import RolloutPrefetcher
from lockstep.rl.rollouts.records import write_rollouts
from lockstep.rl.rollouts.replicas import Replicas
from lockstep.rl.rollouts.rewards import charge_overlong
from lockstep.rl.rollouts.samples import samples_of
from lockstep.rl.rollouts.sampling import Recorded, Sampling, open_graders
from lockstep.rl.rollouts.shares import batches_of_rank, token_budget
from lockstep.rl.scoring.forward import ForwardPasses, Scorer
from lockstep.rl.scoring.policy_loss import PolicyLoss
from lockstep.rl.scoring.reference import (
    ReferenceScorer,
    TeacherScorer,
    WithoutAdapter,
    is_own_base,
    load_reference,
    load_teacher,
    moving_average,
)
from lockstep.rl.scoring.reward_model import RewardModelScorer, load_reward_model
from lockstep.rl.scoring.routes import refuse_replay_without_experts, require_routes
from lockstep.rl.scoring.stage_routes import routes_on_stages
from lockstep.rl.scoring.value_head import ValueScorer, make_critic, train_settings, value_metrics
from lockstep.rl.setup import (
    announce_start,
    learns_from_spread_alone,
    named_environment,
    open_examples,
    resumed_state,
    title_of,
    write_ending,
)
from lockstep.train import Trainer
from lockstep.train.bad_steps import BadSteps
from lockstep.train.resolve_defaults import resolve_defaults
from lockstep.train.stop_signal import RAISED, STOP_RUN, Interrupted, StopSignal, ends_with_error
from lockstep.train.threads import fitting_threads


def reinforce(
    config: RLConfig,
    environment: Environment | None = None,
    progress: Progress | None = None,
    on_metrics: OnMetrics | None = None,
) -> Path:
    """Trains `config.model` on `environment`, or the one that `config` names; returns the run's folder.

    Calls `on_metrics(step, metrics)` after the validation before the first step (step 0) and after every step: what it
    raises ends the run once that step is saved, `lockstep.StopRun` without an error. Raises UserError for bad input,
    ParityError if trainer and generator disagree (unless set to warn), and RunStopped if the run ends early.
    """
    with ExitStack() as opened:
        return _reinforce(config, environment, progress, on_metrics, opened)


def compute_again(config: RLConfig, environment: Environment | None, step: int, drawn: Recorded | None) -> None:
    """Computes only `step`, from the checkpoint before it in `config.output`, and writes metrics and rollouts there.

    Its rollouts are those of `drawn`, or sampled again if that is None. No validation, no checkpoint. Raises as
    `reinforce`.
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
    recorded: Recorded | None = None,
) -> Path:
    """The run, or `only` one step of it; `opened` closes its folder at the end."""
    validate_run(config, RLConfig)
    is_given = environment is not None
    if environment is None:
        require_environment(config.environment)
    world = open_world(config.parallel, config.device)
    opened.callback(close_world, world)
    config = resolve_defaults(suited_to_actors(config, world), world)
    seed_generators(config.seed)
    algorithm = algorithm_of(config)
    config, environment = named_environment(config, environment)
    prompts, held_out = open_examples(config, environment, world)
    model = policy_model(config, world)
    refuse_replay_without_experts(config, model.config)
    tokenizer = load_tokenizer(config.model, model.config.vocab_size)
    model.config = with_ends(model.config, tokenizer, load_chat_template(local_folder(config.model)))
    reference = load_reference(config, world, tokenizer)
    teacher = load_teacher(config, world, tokenizer)
    reward_model = load_reward_model(config, environment, world.device)
    rendering = open_rendering(config.model, config.chat, config.chat_template_kwargs, environment, tokenizer, model)
    critic = make_critic(config, model, world)
    extra_parameters = critic.parameters_by_name() if critic else {}
    trainer = Trainer(model, train_settings(config), config.steps * config.inner_steps, world, extra_parameters)
    average = moving_average(config, reference, trainer)

    require_observers(config.observe, model.device)
    claimed = claim_run(config.output, to_toml(config), config.resume, config.overwrite)
    world.on_main(lambda: opened.enter_context(claimed))
    run = RunFolder(Path(config.output))
    timeline = Timeline(world.rank, config.observe.timeline_steps)
    # In one process the engine samples from the very tensors that the trainer's forward reads.
    generators = open_generators(config, world, model, tokenizer, run.path, opened, timeline.moved)
    timeline.counters.append(lambda: generators.progress)
    scored_by = WithoutAdapter(generators.policy) if is_own_base(config) else reference
    checkpoints = Checkpoints(run.path, trainer, tokenizer, config)
    state = resumed_state(config, world, run, checkpoints, prompts, critic)
    start = state["step"]
    if start and average:
        average.write()
    generators.new_weights(start)
    replicas = Replicas(world, config.actors.separate)
    forward = ForwardPasses(config.train.tokens_per_microbatch, replicas, timeline.moved)
    reward_scorer = reward_model and RewardModelScorer(reward_model, rendering, config.reward_model_weight, forward)
    scorers: list[Scorer] = []
    if scored_by:
        scorers.append(ReferenceScorer(scored_by, config.temperature, forward))
    if teacher:
        scorers.append(TeacherScorer(teacher, config.temperature, forward))
    if critic:
        scorers.append(ValueScorer(generators.policy, critic, forward))
    packing = packing_of(config)
    stop = StopSignal(config.faults.stop_seconds, lambda: checkpoints.newest)
    graders = open_graders(config, environment, is_given, run.path, timeline, opened)
    sampling = Sampling(config, environment, rendering, generators, replicas, graders, stop, recorded)
    prefetcher = RolloutPrefetcher(
        sampling,
        prompts,
        generators.sampler,
        config.prompts_per_step,
        config.actors.max_staleness,
        generators.remembering,
        oversampling=config.oversampling_factor,
    )
    opened.callback(prefetcher.close)
    if state.get("ahead"):
        prefetcher.restore(state["ahead"])
    everyone = "the other ranks" if world.size > 1 else ""

    def judge(step: int) -> dict[str, Any] | None:
        """Samples and grades the held-out examples; writes the rollouts and returns their metrics.

        None, without a trace, if a rank received a signal, which interrupts it.
        """
        random_before = random_state()
        patience = max(sampling.grading_seconds, sampling.start_seconds)
        # No run resumes from a checkpoint with only the model.
        ends = step >= config.steps and config.checkpoint.last_model_only
        interrupts = nullcontext() if ends else stop.interrupts(at_once=not sampling.together)
        with timeline.span("validation", sampling.waits_for, patience), suppress(Interrupted), interrupts:
            judged = sampling.evaluate(held_out)
        if max(replicas.gather(stop.received)) and not ends:
            set_random_state(random_before)
            return None
        with timeline.span("wait", everyone):
            validation, _ = replicas.gather_rollouts(held_out, judged)
        if reward_scorer:
            reward_scorer.score(validation)
        world.on_main(partial(write_rollouts, run.validation_path(step), validation))
        observer.write_samples(step, "validation/samples", samples_of(step, validation, advantages=False))
        metrics = validation_metrics(validation, environment)
        if bar is not None:
            bar.validated(step, metrics)
        return metrics

    def save(step: int, validation_pending: bool = False) -> None:
        """Saves the run as it is after `step`; a resumed run begins with the pending validation."""
        if config.actors.on_update == "finish":
            # Samples in flight would otherwise continue with weights that they would not have had.
            with timeline.span("generate", sampling.waits_for, sampling.seconds):
                prefetcher.wait(step)
        state = {"prompts": prompts.state(), "ahead": world.from_main(prefetcher.state), "unjudged": validation_pending}
        with timeline.span("checkpoint"):
            checkpoints.save(step, state, last=step == config.steps)

    def give_up_if_stopped(step: int) -> None:
        """If any rank received a signal, ends the run in its state before `step`, which has not changed the weights."""
        stopped_by = max(replicas.gather(stop.received))
        if not stopped_by:
            return
        checkpoints.wait()
        if step > 1 and not only and checkpoints.newest != step - 1:
            prefetcher.take_back()
            set_random_state(random_before)
            save(step - 1)
        if step > 1:
            world.on_main(partial(write_report, run.path, title_of(config)))
        raise stop.error(stopped_by, step - 1, config.output)

    def keep_if_long(step: int) -> None:
        """Copies the run as it is after `step`: a signal may come within updates that take too long to finish all."""
        if max(replicas.gather(updating)) < stop.seconds / 2:
            return
        random_now = random_state()
        set_random_state(random_before)
        checkpoints.keep(step)
        set_random_state(random_now)

    # All ranks watch what rank 0 has written, and come to the same conclusion.
    before = world.from_main(lambda: read_metrics(run.metrics))
    validation_pending = bool(held_out) and state.get("unjudged", False) and awaits_validation(before, start)
    unfinished = before.pop() if validation_pending else {}
    ended = start >= config.steps and not validation_pending
    announce_start(config, environment, model, tokenizer, world, start, ended)
    updating = 0.0
    """Seconds that all updates of the last step took."""
    watch = Alarms(config.alarms, before, learns_from_spread_alone(config))
    bad_steps, clock = BadSteps(config.faults, run.path, tokenizer), time.perf_counter()
    with (
        fitting_threads(model.config, config.train.tokens_per_microbatch),
        stop,
        checkpoints,
        Observer(
            config.observe, config.faults, run.path, world.rank, world.size, stop.guarding(on_metrics), timeline
        ) as observer,
        (progress or Progress("rl", config.steps, "step")) if world.is_main else nullcontext() as bar,
    ):
        trainer.timeline = timeline
        if bar is not None:
            bar.advance(min(start, config.steps))
        if held_out and (start == 0 or validation_pending) and not only:
            validation = judge(start)
            if validation is None:
                give_up_if_stopped(start + 1)  # raises
            elif start == 0:
                observer.write(0, validation | watch.enter(0, validation))
            else:
                without_alarms = {name: value for name, value in unfinished.items() if not name.startswith(PREFIX)}
                observer.extend(without_alarms, validation | watch.enter(start, without_alarms | validation))
                if (ending := watch.ending()) and start < config.steps:
                    world.on_main(partial(write_report, run.path, title_of(config)))
                    raise ending
        if (stopped_by := stop.agreed(world)) == RAISED:
            raise stop.error(stopped_by, start, config.output)
        if stopped_by == STOP_RUN:
            return run.path
        for step in range(start + 1, (only or config.steps) + 1):
            with observer.step(step):
                stopwatch = Stopwatch(timeline)
                ledger, outcomes = Ledger(config.prompts_per_step, recorded is not None), list[Outcome]()
                random_before = random_state()
                prefetcher.begin(step, config.steps)
                for extra_round in range(algorithm.extra_rounds + 1):
                    stopwatch.begin("time/generate", sampling.waits_for, sampling.seconds)
                    with suppress(Interrupted), stop.interrupts(at_once=not sampling.together):
                        asked, drawn, places = prefetcher.drawn(step, extra_round, ledger.missing)
                        stopwatch.begin("time/reward", patience=sampling.grading_seconds)
                        graded = sampling.grade(drawn)
                    stopwatch.begin("time/wait", everyone)
                    give_up_if_stopped(step)
                    drawn, graded = replicas.gather_rollouts(asked, drawn, graded)
                    outcomes += graded
                    if reward_scorer:
                        stopwatch.begin("time/reward", patience=sampling.grading_seconds)
                        reward_scorer.score(drawn)
                    timeline.message = f"{len(drawn)} rollouts, graded"
                    stopwatch.begin("time/train")
                    ledger.add(drawn, places)
                    ledger.drop_failed()
                    if algorithm.extra_rounds or algorithm.advantage == "best":
                        ledger.drop_equal_rewards()
                    if not ledger.missing:
                        break
                refuse_too_many(outcomes, config.rewards.failure_limit)
                ledger.keep_some()
                charge_overlong(ledger.rollouts, config.max_new_tokens, algorithm.overlong_share)
                for scorer in scorers:
                    scorer.score(ledger.trained)
                assign_advantages(ledger.trained, algorithm)
                if algorithm.advantage == "best":
                    ledger.drop(lambda rollout: rollout.scores.advantage == 0, "not_best")
                    ledger.keep_some()
                if config.router_replay:
                    require_routes(ledger.trained, model.config)
                budget = token_budget(ledger.trained, packing, world)
                batches = policy_batches(ledger.trained, packing, world.device, budget, step - 1)
                share = batches_of_rank(batches, packing, world, model)
                metrics = packing_metrics(batches, packing)
                give_up_if_stopped(step)
                if config.inner_steps > 1 and step > 1:
                    keep_if_long(step - 1)
                generators.training_begins()
                updates_began = time.perf_counter()
                for inner in range(config.inner_steps):
                    loss = PolicyLoss(
                        algorithm, config.temperature, inner == 0, packing.mask_truncated, config.router_replay, critic
                    )
                    can_be_given_up = inner == 0 or step == 1 or checkpoints.holds(step - 1)
                    asking = trainer.asking(*stop.ending(world, late=True)) if can_be_given_up else nullcontext()
                    try:
                        with asking, routes_on_stages(loss, model, share):
                            stepped = trainer.step(share, loss)
                    except Interrupted:
                        give_up_if_stopped(step)  # raises
                    loss.combine_ranks(batches, share, replicas)
                    metrics |= stepped | loss.metrics()
                    bad_steps.check(step, trainer)
                    if inner == 0:
                        loss.parity.require_equal(step, config.on_parity_error, generators.kept)
                        metrics |= loss.parity.metrics()
                        metrics["policy/ratio_first_max"] = loss.ratio_max
                updating = time.perf_counter() - updates_began
                if average:
                    average.update()
                stopwatch.begin("time/weight_sync", sampling.waits_for, sampling.start_seconds)
                generators.new_weights(step)
                timeline.message = f"weights version {step}"
                stopwatch.end()

                given = (rollout for batch in batches for rollout in batch.rollouts)
                metrics |= rollout_metrics(ledger.rollouts) | ledger.metrics(given) | stopwatch.metrics()
                metrics |= staleness_metrics(ledger.trained, step) | generators.metrics() | prefetcher.metrics()
                metrics |= value_metrics(ledger.trained) | ({"ranks": world.size} if world.size > 1 else {})
                metrics["tokens"] = config.inner_steps * int(metrics["rollout/tokens_trained"])
                metrics["rollout/tokens_per_second"] = metrics["rollout/tokens"] / metrics["time/generate"]
                validation_pending = False
                if held_out and not only and due(step, config.validation_every, config.steps):
                    validation = judge(step)
                    validation_pending = validation is None
                    metrics |= validation or {}
                observer.write(step, metrics | watch.enter(step, metrics))
                if observer.samples_due(step):
                    observer.write_samples(step, "rollout/samples", samples_of(step, ledger.trained))
                stopped_by = stop.agreed(world)
                world.on_main(partial(write_rollouts, run.rollouts_path(step), ledger.rollouts, config.router_replay))
                trainer.balance.write(run.expert_load, step)
                world.on_main(partial(append_step, run.prompts, step, ledger.places()))
                if not only and (stopped_by or checkpoints.due(step)):
                    save(step, validation_pending)
            if bar is not None:
                shown = {"reward": metrics["reward/mean"], "different": metrics["parity/tokens_different"]}
                bar.advance(1, "", **shown | observer.for_terminal(metrics))
            finished = step >= config.steps and not validation_pending
            if stopped_by == STOP_RUN:
                break
            ends: BaseException | None = None if finished else watch.ending()
            if ends_with_error(stopped_by, finished):
                ends = stop.error(stopped_by, step, config.output)
            if ends:
                world.on_main(partial(write_report, run.path, title_of(config)))
                raise ends

    # The last checkpoint may still be being written.
    world.barrier()
    if world.is_main and not only and not (ended and run.summary.is_file()):
        write_ending(config, world, run, generators, start, clock, prompts.shared(held_out))
    elif world.is_main and not only and run.lacks_report:
        write_report(run.path, title_of(config))
    return run.path
