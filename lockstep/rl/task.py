"""A step of reinforcement: sample, score, advantages, pack, update, hand over the weights, record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

from lockstep.config import RLConfig, algorithm_of
from lockstep.rl.generators.protocol import Generators
from lockstep.rl.grading import Outcome, refuse_too_many
from lockstep.rl.rollouts.advantages import assign_advantages
from lockstep.rl.rollouts.ledger import Ledger
from lockstep.rl.rollouts.metrics import Stopwatch, due, rollout_metrics, staleness_metrics, validation_metrics
from lockstep.rl.rollouts.packing import PolicyBatch, packing_metrics, packing_of, policy_batches
from lockstep.rl.rollouts.prefetcher import RolloutPrefetcher, SampledRound
from lockstep.rl.rollouts.records import Rollout
from lockstep.rl.rollouts.rewards import charge_overlong
from lockstep.rl.rollouts.run_records import RunRecords
from lockstep.rl.rollouts.sampling import Sampling
from lockstep.rl.rollouts.shares import batches_of_rank, token_budget
from lockstep.rl.scoring.forward import ForwardPasses
from lockstep.rl.scoring.policy_loss import PolicyLoss
from lockstep.rl.scoring.reference import moving_average
from lockstep.rl.scoring.routes import require_routes
from lockstep.rl.scoring.stage_routes import routes_on_stages
from lockstep.rl.scoring.value_head import value_metrics
from lockstep.rl.setup import RunParts, reward_scorer, scorers
from lockstep.run.session import Session
from lockstep.run.stop import Interrupted
from lockstep.run.task import Metrics, Resumable, StepObserver
from lockstep.train import Trainer
from lockstep.train.faults import BadSteps


class PolicyTask:
    """Reinforcement: samples with the policy, scores the samples, and trains on their rewards."""

    def __init__(
        self,
        config: RLConfig,
        parts: RunParts,
        trainer: Trainer,
        generators: Generators,
        sampling: Sampling,
        prefetcher: RolloutPrefetcher,
        session: Session,
    ):
        self.config, self.algorithm = config, algorithm_of(config)
        self.parts, self.trainer, self.generators = parts, trainer, generators
        self.sampling, self.prefetcher = sampling, prefetcher
        self.timeline, self.run = session.timeline, session.run
        forward = ForwardPasses(config.train.tokens_per_microbatch, sampling.replicas, self.timeline.moved)
        self.scorers = scorers(config, parts, generators, forward)
        self.reward_scorer = reward_scorer(config, parts, forward)
        self.packing = packing_of(config)
        self.average = moving_average(config, parts.reference, trainer)
        self.records = RunRecords(session, config.router_replay)
        self.bad_steps = BadSteps(config.faults, session.run.path, parts.tokenizer)
        self.observers: list[StepObserver] = []
        finishes = config.actors.on_update == "finish"
        self.resumables: Mapping[str, Resumable] = {
            "prompts": parts.prompts,
            "ahead": _InFlight(prefetcher, self._waiting if finishes else None),
        }

    def start(self, step: int) -> None:
        """Gives generators and reference the weights after `step`, from which the run starts or resumes."""
        if step and self.average:
            self.average.write()
        self.generators.load_weights(step)
        self.prefetcher.complete(step)

    def step(self, step: int) -> Metrics:
        """Samples, and updates the weights `updates_per_batch` times on what it has sampled."""
        self.clock = Stopwatch(self.timeline)
        groups = self.sample(step)
        for scorer in self.scorers:
            with self.sampling.scoring():
                scorer.score(groups.trained)
        assign_advantages(groups.trained, self.algorithm, self.parts.functions.advantage)
        if self.algorithm.advantage == "best":
            groups.keep_best()
        world, model = self.trainer.world, self.trainer.model
        if self.config.router_replay:
            require_routes(groups.trained, model.config)
        budget = token_budget(groups.trained, self.packing, world)
        batches = policy_batches(groups.trained, self.packing, world.device, budget, version=step - 1)
        share = batches_of_rank(batches, self.packing, world, model)
        self.sampling.raise_if_interrupted()
        self.generators.pause()
        metrics = self.update(step, batches, share)
        self.clock.begin("time/weight_sync", self.sampling.waits_for, self.sampling.start_seconds)
        self.generators.load_weights(step)
        self.timeline.message = f"weights version {step}"
        self.clock.end()
        self.prefetcher.complete(step)
        self.groups = groups
        return metrics | self.step_metrics(step, groups, batches)

    def sample(self, step: int) -> Ledger:
        """Samples and grades groups until there are as many as the step trains on, or as the algorithm may request."""
        groups, outcomes = Ledger(self.config.prompts_per_step, self.sampling.is_recorded), list[Outcome]()
        self.prefetcher.begin(step, self.config.steps)
        for extra_round in range(self.algorithm.extra_rounds + 1):
            rollouts, places, graded = self._round(step, extra_round, groups.missing)
            outcomes += graded
            groups.add(rollouts, places)
            groups.drop_failed()
            if self.algorithm.extra_rounds or self.algorithm.advantage == "best":
                groups.drop_equal_rewards()
            if not groups.missing:
                break
        refuse_too_many(outcomes, self.config.rewards.failure_limit)
        groups.restore_if_empty()
        charge_overlong(groups.rollouts, self.config.max_new_tokens, self.algorithm.overlong_share)
        return groups

    def _round(self, step: int, extra_round: int, missing: int) -> tuple[list[Rollout], list[int], list[Outcome]]:
        """One round of a step's sampling, graded: rollouts, the positions of their prompts, outcomes of the rewards."""
        clock, sampling = self.clock, self.sampling
        clock.begin("time/generate", sampling.waits_for, sampling.seconds)
        sampled, outcomes = SampledRound([], [], []), list[Outcome]()
        sample = self.prefetcher.take_round(step, extra_round, missing)
        with suppress(Interrupted):
            with sampling.interruptible():
                sampled = sample()
            clock.begin("time/reward", patience=sampling.grading_seconds)
            outcomes = sampling.grade(sampled.rollouts)
        clock.begin("time/wait", sampling.other_ranks)
        rollouts, outcomes = sampling.gather(sampled.examples, sampled.rollouts, outcomes)
        if self.reward_scorer:
            clock.begin("time/reward", patience=sampling.grading_seconds)
            with sampling.scoring():
                self.reward_scorer.score(rollouts)
        self.timeline.message = f"{len(rollouts)} rollouts, graded"
        clock.begin("time/train")
        return rollouts, sampled.places, outcomes

    def update(self, step: int, batches: Sequence[PolicyBatch], share: Sequence[PolicyBatch]) -> Metrics:
        """Updates the weights on a step's micro-batches, of which this rank computes `share`.

        The first update compares the trainer's log-probabilities with the generator's. Raises ParityError if they
        differ, unless the run's settings allow it.
        """
        metrics: Metrics = {}
        for update in range(self.config.updates_per_batch):
            loss = PolicyLoss(
                self.algorithm,
                self.config.temperature,
                compare=update == 0,
                mask_truncated=self.config.mask_truncated_completions,
                replay_routes=self.config.router_replay,
                value_head=self.parts.value_head,
                own=self.parts.functions.loss,
            )
            with routes_on_stages(loss, self.trainer.model, share):
                metrics |= self.trainer.step(share, loss)
            loss.combine_ranks(batches, share, self.sampling.replicas)
            metrics |= loss.metrics()
            self.bad_steps.check(step, self.trainer)
            if update == 0:
                loss.parity.require_equal(step, self.config.on_parity_error, self.generators.policy_while_paused)
                metrics |= loss.parity.metrics()
                metrics["policy/ratio_first_max"] = loss.ratio_max
        if self.average:
            self.average.update()
        return metrics

    def step_metrics(self, step: int, groups: Ledger, batches: Sequence[PolicyBatch]) -> Metrics:
        """What the parts of a finished step report."""
        packed = (rollout for batch in batches for rollout in batch.rollouts)
        metrics: Metrics = packing_metrics(batches, self.packing)
        metrics |= rollout_metrics(groups.rollouts) | groups.metrics(packed) | self.clock.metrics()
        metrics |= staleness_metrics(groups.trained, step) | self.generators.metrics() | self.prefetcher.metrics()
        metrics |= value_metrics(groups.trained) | self.sampling.replicas.metrics()
        metrics["tokens"] = self.config.updates_per_batch * int(metrics["rollout/tokens_trained"])
        # Sampling ahead takes the whole step, of which the trainer waits for a part.
        seconds = metrics["time/step" if self.config.actors.max_staleness else "time/generate"]
        metrics["rollout/tokens_per_second"] = metrics["rollout/tokens"] / seconds
        return metrics

    def record(self, step: int) -> None:
        self.records.write(step, self.groups)
        self.trainer.balance.write(self.run.expert_load, step)

    @property
    def ended(self) -> bool:
        return False  # prompts are repeated, in another order

    def validates_after(self, step: int) -> bool:
        return bool(self.parts.held_out) and (step == 0 or due(step, self.config.validation_every, self.config.steps))

    def validate(self, step: int) -> Metrics:
        """Samples and grades the held-out examples, the same ones every time, and writes the rollouts.

        Raises Interrupted on all ranks, without a trace, if a signal interrupts it on any.
        """
        sampling, rollouts = self.sampling, list[Rollout]()
        patience = max(sampling.grading_seconds, sampling.start_seconds)
        with self.timeline.span("validation", sampling.waits_for, patience), suppress(Interrupted):
            rollouts = sampling.evaluate(self.parts.held_out)
        with self.timeline.span("wait", sampling.other_ranks):
            rollouts, _ = sampling.gather(self.parts.held_out, rollouts)
        if self.reward_scorer:
            with sampling.scoring():
                self.reward_scorer.score(rollouts)
        self.records.write_validation(step, rollouts)
        return validation_metrics(rollouts, self.parts.environment)

    def shown(self, metrics: Metrics) -> dict[str, float]:
        return {"reward": metrics["reward/mean"], "different": metrics["parity/tokens_different"]}

    def _waiting(self) -> AbstractContextManager[None]:
        return self.timeline.span("generate", self.sampling.waits_for, self.sampling.seconds)


class _InFlight:
    """Checkpoint state of the samples in flight.

    waiting: entered while samples of older weights are finished first, if generators finish them (actors.on_update):
    in a resumed run they would continue with newer weights.
    """

    def __init__(self, prefetcher: RolloutPrefetcher, waiting: Callable[[], AbstractContextManager[None]] | None):
        self._prefetcher, self._waiting = prefetcher, waiting

    def state(self) -> dict[str, Any]:
        if self._waiting:
            with self._waiting():
                self._prefetcher.wait()
        return self._prefetcher.state()

    def restore(self, state: Any) -> None:
        self._prefetcher.restore(state)
