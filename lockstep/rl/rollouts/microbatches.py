"""Which rollouts form a micro-batch, and which of them leave out the prompt because another one has it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch

from lockstep.rl.rollouts.records import Rollout
from lockstep.train.packing import PackedRow, first_fit_decreasing, pack_scored


@dataclass
class MicroBatchPlan:
    """Rollouts that are computed together, in the order of the step's rollouts."""

    rollouts: list[Rollout] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    """Index of each rollout among the step's."""
    left_out: list[int] = field(default_factory=list)
    """For each rollout, the number of leading tokens that it shares with the last one before it that shares none."""
    rows: int = 0
    """Tokens to compute: a completion's last one makes no prediction."""

    def add(self, rollout: Rollout, number: int, left_out: int) -> None:
        self.rollouts.append(rollout)
        self.numbers.append(number)
        self.left_out.append(left_out)
        self.rows += len(rollout.prompt_ids) + len(rollout.token_ids) - 1 - left_out

    def packed(self, device: str | torch.device) -> PackedRow:
        """Their tokens in one row, whose targets are the sampled ones."""
        sequences = [rollout.prompt_ids + rollout.token_ids for rollout in self.rollouts]
        return pack_scored(sequences, [rollout.targets() for rollout in self.rollouts], self.left_out, device)


def microbatches(rollouts: Sequence[Rollout], budget: int, share_prompts: bool = True) -> list[MicroBatchPlan]:
    """Micro-batches of at most `budget` rows, as few as first-fit decreasing finds; a longer completion goes alone.

    With `share_prompts`, consecutive completions of a prompt share it, as many as fit: that pays off for prompts of
    three tokens or more and costs 1 % at two (benchmarks/NOTES.md). The grouping and its order depend only on the
    rollouts' lengths and prompts.
    """
    runs = list(_runs(rollouts, budget, share_prompts))
    batches = []
    for together in first_fit_decreasing([run.rows for run in runs], budget):
        joined = MicroBatchPlan()
        for run in (runs[index] for index in together):
            joined.rollouts += run.rollouts
            joined.numbers += run.numbers
            joined.left_out += run.left_out
            joined.rows += run.rows
        batches.append(joined)
    return batches


def _runs(rollouts: Sequence[Rollout], budget: int, share_prompts: bool) -> Iterator[MicroBatchPlan]:
    """Units that cannot be split: completions that share a prompt, up to the budget."""
    for prompt, members in groupby(enumerate(rollouts), key=lambda member: member[1].prompt_ids):
        # The prompt's last token predicts the first of each completion, and stays with it.
        shared = len(prompt) - 1 if share_prompts else 0
        run = MicroBatchPlan()
        for number, rollout in members:
            if run.rollouts and (not shared or run.rows + len(rollout.token_ids) > budget):
                yield run
                run = MicroBatchPlan()
            run.add(rollout, number, shared if run.rollouts else 0)
        yield run
