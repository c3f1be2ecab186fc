"""Validation of a policy: held-out examples, sampled and graded with its current weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from lockstep.observe import Timeline
from lockstep.rl.environments.protocol import Environment, Example
from lockstep.rl.rollouts.metrics import validation_metrics
from lockstep.rl.rollouts.records import Rollout
from lockstep.rl.rollouts.run_records import RunRecords
from lockstep.rl.rollouts.sampling import Sampling
from lockstep.rl.scoring.reward_model import RewardModelScorer
from lockstep.run.stop import Interrupted
from lockstep.run.task import Metrics


class Validation:
    """Samples and grades held-out examples, the same ones every time."""

    def __init__(
        self,
        held_out: Sequence[Example],
        environment: Environment,
        sampling: Sampling,
        records: RunRecords,
        timeline: Timeline,
        reward_scorer: RewardModelScorer | None = None,
    ):
        """reward_scorer: None without a reward model."""
        self.held_out, self._environment, self._sampling = held_out, environment, sampling
        self._records, self._timeline, self._reward_scorer = records, timeline, reward_scorer

    def run(self, step: int) -> Metrics:
        """Writes the rollouts of the validation after `step`; returns its metrics.

        Raises Interrupted on all ranks, without a trace, if a signal interrupts it on any.
        """
        sampling, timeline, rollouts = self._sampling, self._timeline, list[Rollout]()
        patience = max(sampling.grading_seconds, sampling.start_seconds)
        with timeline.span("validation", sampling.waits_for, patience), suppress(Interrupted):
            rollouts = sampling.evaluate(self.held_out)
        with timeline.span("wait", sampling.other_ranks):
            rollouts, _ = sampling.gather(self.held_out, rollouts)
        if self._reward_scorer:
            with sampling.scoring():
                self._reward_scorer.score(rollouts)
        self._records.write_validation(step, rollouts)
        return validation_metrics(rollouts, self._environment)
