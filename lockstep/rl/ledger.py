"""Where the prompts of a step went: drawn = trained + dropped, each with its cause."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lockstep.rl.rollouts import Rollout


class Ledger:
    """All rollouts of a step, those of dropped groups included, and which of them are trained on."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        """Groups to train on."""
        self.rollouts: list[Rollout] = []
        self._groups = 0

    def add(self, drawn: Sequence[Rollout]) -> None:
        """Enters graded rollouts, whose groups are numbered from 0, under numbers that go on from those held."""
        for rollout in drawn:
            rollout.group += self._groups
        self._groups += len({rollout.group for rollout in drawn})
        self.rollouts += drawn

    @property
    def missing(self) -> int:
        """Groups that are still to be drawn."""
        return self.wanted - len({rollout.group for rollout in self.trained})

    @property
    def trained(self) -> list[Rollout]:
        """The rollouts that are not dropped, in the order of their groups."""
        return [rollout for rollout in self.rollouts if not rollout.dropped]

    def drop_equal_rewards(self) -> None:
        """Drops every group whose completions all have the same reward (DAPO, arXiv 2503.14476, equation 11)."""
        rewards: dict[int, set[float]] = {}
        for rollout in self.rollouts:
            rewards.setdefault(rollout.group, set()).add(rollout.reward)
        self.drop(lambda rollout: len(rewards[rollout.group]) == 1, "equal_rewards")

    def drop(self, unwanted: Callable[[Rollout], bool], cause: str) -> None:
        """Drops the rollouts that are `unwanted` and not dropped yet."""
        for rollout in self.trained:
            if unwanted(rollout):
                rollout.dropped = cause

    def keep_some(self) -> None:
        """Takes the first `wanted` groups back where nothing is left: the step is made all the same, with whatever
        has a gradient then, such as the KL divergence."""
        if not self.trained:
            for rollout in self.rollouts:
                rollout.dropped = "" if rollout.group < self.wanted else rollout.dropped

    def metrics(self) -> dict[str, float]:
        """Prompts drawn, trained on and dropped by cause, and completions trained on, of this step."""
        trained = {rollout.group for rollout in self.trained}
        causes = {rollout.group: rollout.dropped for rollout in self.rollouts if rollout.group not in trained}
        dropped: dict[str, float] = {}
        for cause in causes.values():
            name = f"rollout/prompts_dropped/{cause}"
            dropped[name] = dropped.get(name, 0.0) + 1.0
        return {
            "rollout/prompts_drawn": float(self._groups),
            "rollout/prompts_trained": float(len(trained)),
            **dropped,
            "rollout/completions_trained": float(len(self.trained)),
            "rollout/tokens_trained": float(sum(len(r.prompt_ids) + len(r.token_ids) for r in self.trained)),
        }
