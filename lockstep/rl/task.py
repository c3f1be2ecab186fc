"""A step of reinforcement: sample, score, advantages, pack, update, hand over the weights, record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

from lockstep.config import RLConfig, algorithm_of
from lockstep.rl.generators.protocol import Generators
from lockstep.rl.grading import Outcome, refuse_too_many
from lockstep.rl.rollouts.collect import assign_advantages, charge_overlong
from lockstep.rl.rollouts.ledger import Ledger
from lockstep.rl.rollouts.metrics import Stopwatch, accepted, due, rollout_metrics, staleness_metrics
from lockstep.rl.rollouts.packing import PolicyBatch, PolicyLoss, masking_metrics, packing_metrics, policy_batches
from lockstep.rl.rollouts.prefetcher import RolloutPrefetcher
from lockstep.rl.rollouts.prompts import PromptLoader
from lockstep.rl.rollouts.records import Rollout
from lockstep.rl.rollouts.run_records import RunRecords
from lockstep.rl.rollouts.sampling import Sampling
from lockstep.rl.rollouts.shares import own_batches, share_findings, token_budget
from lockstep.rl.scoring.stage_routes import routes_on_stages
from lockstep.rl.scoring.value_head import value_metrics
from lockstep.rl.setup import Scoring
from lockstep.rl.validation import Validation
from lockstep.run.session import Session
from lockstep.run.stop import Interrupted
from lockstep.run.task import Metrics, Resumable, StepObserver
from lockstep.train import Trainer
from lockstep.train.bad_steps import BadSteps


class PolicyTask:
    """Steps that improve a policy by the rewards of what it samples."""

    def __init__(
        self,
        config: RLConfig,
        session: Session,
        trainer: Trainer,
        scoring: Scoring,
        generators: Generators,
        sampling: Sampling,
        prefetcher: RolloutPrefetcher,
        held_out: Sequence[Example],
    ):
        self.config, self.algorithm = config, algorithm_of(config)
        self.trainer, self.scoring, self.generators = trainer, scoring, generators
        self.sampling, self.prefetcher = sampling, prefetcher
        self.timeline, self.run = session.timeline, session.run
        self.records = RunRecords(session, config.router_replay)
        self.bad_steps = BadSteps(config.faults, session.run.path, scoring.tokenizer)
        self.validation = Validation(held_out, scoring.environment, sampling, self.records, self.timeline, scoring.reward)
        self.observers: list[StepObserver] = []
        self.resumables: Mapping[str, Resumable] = {"prompts": prompts, "ahead": _InFlight(prefetcher, waiting)}

    def step(self, step: int) -> Metrics:
        """Samples, and updates the weights `updates_per_batch` times on what it has sampled."""
        self.clock = Stopwatch(self.timeline)
        groups = self.sample(step)
        for score in self.scoring.scorers:
            score(groups.trained)
        assign_advantages(groups.trained, self.algorithm)
        if self.algorithm.advantage == "best":
            groups.keep_best()
        world, model = self.trainer.world, self.trainer.model
        budget = token_budget(groups.trained, self.config, world)
        batches = policy_batches(groups.trained, self.config, world.device, budget, version=step - 1)
        share = own_batches(batches, self.config, world, model)
        self.sampling.raise_if_interrupted()
        self.generators.pause()
        metrics = self.update(step, batches, share)
        self.clock.begin("time/weight_sync", self.sampling.waits_for, self.sampling.start_seconds)
        self.generators.load_weights(step)
        self.timeline.message = f"weights version {step}"
        self.clock.end()
        self.prefetcher.complete(step)
        self.records.write(step, groups)
        self.trainer.balance.write(self.run.expert_load, step)
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
        groups.keep_some()
        charge_overlong(groups.rollouts, self.config.max_new_tokens, self.algorithm.overlong_share)
        return groups
