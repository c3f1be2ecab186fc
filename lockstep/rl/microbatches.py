"""Which rollouts make a micro-batch, and which of them leave out the prompt because another one brings it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from lockstep.rl.rollouts import Rollout
from lockstep.train.packing import first_fit_decreasing


@dataclass
class Members:
    """Rollouts that are trained on together, in the order of the step's rollouts."""

    rollouts: list[Rollout] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    """Of each, among the step's rollouts."""
    left_out: list[int] = field(default_factory=list)
    """Of each, how many first tokens it shares with the last rollout before it that leaves out none."""

    @property
    def rows(self) -> int:
        """Tokens to compute: a completion's last one predicts nothing."""
        return sum(
            len(rollout.prompt_ids) + len(rollout.token_ids) - 1 - left_out
            for rollout, left_out in zip(self.rollouts, self.left_out)
        )


def microbatches(rollouts: Sequence[Rollout], budget: int) -> list[Members]:
    """Micro-batches of at most `budget` rows, as few as first-fit decreasing finds; a longer completion stands alone.

    Completions of one prompt that follow each other share it, as many as fit: that pays from prompts of three tokens on
    and costs 1 % at two (benchmarks/NOTES.md). What goes together, and in which order, depends on the rollouts' lengths
    and prompts alone.
    """
    runs = list(_runs(rollouts, budget))
    batches = []
    for together in first_fit_decreasing([run.rows for run in runs], budget):
        joined = Members()
        for run in (runs[index] for index in together):
            joined.rollouts += run.rollouts
            joined.numbers += run.numbers
            joined.left_out += run.left_out
        batches.append(joined)
    return batches


def _runs(rollouts: Sequence[Rollout], budget: int) -> Iterator[Members]:
    """What cannot be parted: completions with a prompt between them, up to the budget."""
    for prompt, members in groupby(enumerate(rollouts), key=lambda member: member[1].prompt_ids):
        # The prompt's last token predicts the first of each completion, and stays with it.
        shared = len(prompt) - 1
        run = Members()
        for number, rollout in members:
            if run.rollouts and (not shared or run.rows + len(rollout.token_ids) > budget):
                yield run
                run = Members()
            run.left_out.append(shared if run.rollouts else 0)
            run.rollouts.append(rollout)
            run.numbers.append(number)
        yield run
