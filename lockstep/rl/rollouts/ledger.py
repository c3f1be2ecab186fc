"""The groups of a step: each is trained on, or dropped for a recorded cause; none is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from lockstep.errors import UserError
from lockstep.rl.rollouts.records import Rollout, episodes_of

FAILED_REWARDS = "failed_rewards"
"""The reward failed, or fewer than two rewards of the group are left to compare because others failed."""
STRAGGLERS = "stragglers"
"""Discarded: more groups were requested than wanted, and this one was not among the first to finish."""


class LedgerError(Exception):
    """Groups were lost or counted twice: a bug in the loop, not a problem with its input."""


class Ledger:
    """All rollouts of a step, including those of dropped groups, and which of them are trained on."""

    def __init__(self, wanted: int, recorded: bool = False) -> None:
        """recorded: whether the rollouts are those of another run, in which case there may be too few."""
        self.wanted = wanted
        """Groups to train on."""
        self._recorded = recorded
        self.rollouts: list[Rollout] = []
        self._places: list[int] = []
        """The position of each group's prompt."""
        self._stragglers: list[int] = []
        """The groups without rollouts."""

    def add(self, rollouts: Sequence[Rollout], places: Sequence[int]) -> None:
        """Adds the graded rollouts of a round, whose groups are numbered from 0, and renumbers them.

        places: positions of the prompts of all groups that were requested. Raises LedgerError if there are fewer groups
        than were missing and than were requested.
        """
        groups, before = {rollout.group for rollout in rollouts}, len(self._places)
        if len(groups) != min(self.missing, len(places)) and not self._recorded:
            raise LedgerError(
                f"{len(groups)} groups came from {len(places)} prompts, but {self.missing} were missing; this is a bug "
                "in Lockstep"
            )
        self._places += places
        self._stragglers += [before + group for group in range(len(places)) if group not in groups]
        self.rollouts += [replace(each, group=before + each.group) for each in rollouts] if before else rollouts

    @property
    def missing(self) -> int:
        """Number of groups that still have to be sampled."""
        return self.wanted - len({rollout.group for rollout in self.trained})

    @property
    def trained(self) -> list[Rollout]:
        """The rollouts that are not dropped, ordered by group."""
        return [rollout for rollout in self.rollouts if not rollout.scores.dropped]

    def drop(self, unwanted: Callable[[Rollout], bool], cause: str) -> None:
        """Drops the rollouts that are `unwanted` and not dropped yet."""
        for rollout in self.trained:
            if unwanted(rollout):
                rollout.scores.dropped = cause

    def drop_failed(self) -> None:
        """Drops every rollout whose reward failed and does not count, and a group's last remaining rollout."""
        self.drop(lambda rollout: not rollout.scores.counts, FAILED_REWARDS)
        failed = {rollout.group for rollout in self.rollouts if not rollout.scores.counts}
        left = Counter(rows[0].group for rows in episodes_of(self.trained))
        self.drop(lambda rollout: rollout.group in failed and left[rollout.group] < 2, FAILED_REWARDS)

    def drop_equal_rewards(self) -> None:
        """Drops every group whose completions all have the same reward (DAPO, arXiv 2503.14476, equation 11)."""
        rewards: dict[int, set[float]] = {}
        for rollout in self.trained:
            rewards.setdefault(rollout.group, set()).add(rollout.scores.reward)
        self.drop(lambda rollout: len(rewards[rollout.group]) == 1, "equal_rewards")

    def keep_best(self) -> None:
        """Drops every rollout without an advantage, of an algorithm that trains on the best completions alone."""
        self.drop(lambda rollout: rollout.scores.advantage == 0, "not_best")
        self.restore_if_empty()

    def restore_if_empty(self) -> None:
        """If all groups are dropped, restores the first ones, up to `wanted`: the step then trains on what still has a
        gradient, such as the KL divergence. Raises UserError if all rewards failed."""
        if self.trained:
            return
        valid = sorted({rollout.group for rollout in self.rollouts if rollout.scores.dropped != FAILED_REWARDS})
        for rollout in self.rollouts:
            if rollout.group in valid[: self.wanted] and rollout.scores.dropped != FAILED_REWARDS:
                rollout.scores.dropped = ""
        if not self.trained:
            raise UserError(
                f"no group of this step has two rewards that did not fail ({len(self.rollouts)} rollouts), so there is "
                'nothing to train on; fix the reward, or set rewards.on_failure = "zero"'
            )

    def places(self) -> dict[str, Any]:
        """The positions of the prompts trained on, as `trained`, and of the others by cause, as `dropped`."""
        trained = dict.fromkeys(rollout.group for rollout in self.trained)
        dropped: dict[str, list[int]] = {}
        for group, cause in self._causes().items():
            dropped.setdefault(cause, []).append(self._places[group])
        return {"trained": [self._places[group] for group in trained], "dropped": dropped}

    def _causes(self) -> dict[int, str]:
        """For each group that is not trained on, the cause."""
        trained = {rollout.group for rollout in self.trained}
        causes = {rollout.group: rollout.scores.dropped for rollout in self.rollouts if rollout.group not in trained}
        return causes | dict.fromkeys(self._stragglers, STRAGGLERS)

    def metrics(self, packed: Iterable[Rollout]) -> dict[str, float]:
        """This step's prompts sampled, trained on, and dropped by cause, and completions trained on.

        packed: the rollouts of the trainer's micro-batches. Raises LedgerError unless they are exactly those not
        dropped, and sampled = trained + dropped.
        """
        trained = {rollout.group for rollout in self.trained}
        causes = self._causes()
        dropped = Counter(causes.values())
        is_complete = len(self._places) == len(trained) + len(causes)
        if not is_complete or {id(rollout) for rollout in packed} != {id(rollout) for rollout in self.trained}:
            by_cause = ", ".join(f"{count} {cause}" for cause, count in sorted(dropped.items())) or "none"
            raise LedgerError(
                f"{len(self._places)} groups were drawn, {len(trained)} trained on and {len(causes)} dropped "
                f"({by_cause}): that does not add up, or the trainer was given other groups; this is a bug in Lockstep"
            )
        return {
            "groups/drawn": float(len(self._places)),
            "groups/trained": float(len(trained)),
            **{f"groups/dropped/{cause}": float(count) for cause, count in sorted(dropped.items())},
            "rollout/completions_trained": float(len(episodes_of(self.trained))),
            "rollout/tokens_trained": float(sum(len(r.prompt_ids) + len(r.token_ids) for r in self.trained)),
        }
