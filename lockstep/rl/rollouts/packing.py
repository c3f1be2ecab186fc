"""From graded rollouts to the micro-batches of a training step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lockstep.config import RLConfig, algorithm_of
from lockstep.rl.algorithms import token_weights
from lockstep.rl.rollouts.records import Rollout, episodes_of
from lockstep.train.packing import PackedRow, first_fit_decreasing, pack_scored


@dataclass(frozen=True)
class Packing:
    """How a step's rollouts are packed into micro-batches, and what their tokens weigh in the loss."""

    tokens_per_microbatch: int
    """At most; a longer completion is a micro-batch alone."""
    max_new_tokens: int
    loss_average: Literal["token", "sequence", "budget"]
    """As for `token_weights`."""
    mask_truncated: bool
    """Whether the tokens of truncated completions weigh 0."""
    share_prompts: bool
    """Whether a prompt is computed once for the completions after it. Its gradient is then summed over them first,
    which gives other bits than without."""
    deterministic_layout: bool
    """Whether micro-batches, and with them the sums over them, must not depend on the ranks."""


def packing_of(config: RLConfig) -> Packing:
    """A run's packing: prompts are shared unless ranks share a row, or the layout has to be deterministic."""
    return Packing(
        config.train.tokens_per_microbatch,
        config.max_new_tokens,
        algorithm_of(config).loss_average,
        config.mask_truncated_completions,
        share_prompts=config.parallel.context == 1 and not config.train.deterministic_layout,
        deterministic_layout=config.train.deterministic_layout,
    )


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


@dataclass
class PolicyBatch:
    """One micro-batch of packed rollouts, whose targets are the sampled tokens."""

    rollouts: Sequence[Rollout]
    row: PackedRow
    old_log_probs: Float[Tensor, "targets"]
    """The generator's, before top-k, top-p and min-p."""
    advantages: Float[Tensor, "targets"]
    weights: Float[Tensor, "targets"]
    """Weight of each token in the loss; over the step they add up to 1, except with `loss_average = "budget"` or masked
    completions, whose tokens weigh 0."""
    reference_log_probs: Float[Tensor, "targets"] | None
    truncated_log_probs: Float[Tensor, "targets"] | None = None
    """The generator's, of the distribution that the tokens were drawn from; None: the same as `old_log_probs`."""
    old_values: Float[Tensor, "targets"] | None = None
    """V of each token's state before the step, if there is a value function."""
    returns: Float[Tensor, "targets"] | None = None
    """The targets of the values."""
    before_step: Float[Tensor, "targets"] | None = None
    """The trainer's log-probabilities in the first update, for off-policy corrections."""
    current: Bool[Tensor, "targets"] | None = None
    """Which tokens were sampled from the weights that the step starts with; None: all."""
    idle: bool = False
    """Whether it is a filler for a rank that has none of the step's micro-batches left: it contributes nothing."""


def policy_batches(
    rollouts: Sequence[Rollout],
    packing: Packing,
    device: str | torch.device = "cpu",
    budget: int = 0,
    version: int | None = None,
) -> list[PolicyBatch]:
    """Packs whole completions into micro-batches of at most `budget` tokens.

    budget: 0 means `packing.tokens_per_microbatch`. version: of the weights at the start of the step; None: the one
    that sampled all rollouts.
    """
    weights = _weights(rollouts, packing)
    batches = []
    for plan in microbatches(rollouts, budget or packing.tokens_per_microbatch, packing.share_prompts):
        chosen = plan.rollouts
        stale = [] if version is None else [age for rollout in chosen for age in rollout.staleness(version)]
        batches.append(
            PolicyBatch(
                rollouts=chosen,
                current=torch.tensor([age == 0 for age in stale], device=device) if any(stale) else None,
                row=plan.packed(device),
                old_log_probs=torch.tensor([x for r in chosen for x in r.logprobs], device=device),
                advantages=torch.tensor([a for r in chosen for a in r.advantages_of_tokens()], device=device),
                weights=torch.cat([weights[number] for number in plan.numbers]).to(device),
                reference_log_probs=_optional([x for r in chosen for x in r.scores.reference_logprobs], device),
                truncated_log_probs=_optional([x for r in chosen for x in r.truncated_logprobs], device),
                old_values=_optional([x for r in chosen for x in r.scores.values], device),
                returns=_optional([x for r in chosen for x in r.scores.returns], device),
            )
        )
    return batches


def _optional(values: list[float], device: str | torch.device) -> Tensor | None:
    """None if no rollout has such values."""
    return torch.tensor(values, device=device) if values else None


def _weights(rollouts: Sequence[Rollout], packing: Packing) -> list[Tensor]:
    """Weights of each rollout's sampled tokens; the rows of an episode are one completion, truncated if its last is."""
    episodes = episodes_of(rollouts)
    lengths = [[r.num_sampled for r in rows] for rows in episodes]
    masked = [packing.mask_truncated and rows[-1].finish_reason == "length" for rows in episodes]
    totals = [sum(of_rows) for of_rows in lengths]
    weights = token_weights(totals, packing.loss_average, packing.max_new_tokens, masked)
    return [part for of_episode, of_rows in zip(weights, lengths) for part in of_episode.split(of_rows)]


def packing_metrics(batches: Sequence[PolicyBatch], packing: Packing) -> dict[str, float]:
    """The number of micro-batches, and fractions of what goes through the model.

    `rollout/padding`: computed positions that hold no token. `rollout/prompt_tokens_shared`: prompt tokens that are not
    recomputed. `rollout/masked_tokens`, if truncated completions are masked: sampled tokens without weight.
    """
    rows = sum(len(batch.row.tokens) for batch in batches)
    shared = sum(sum(batch.row.left_out or ()) for batch in batches)
    computed = sum(sum(batch.row.lengths) for batch in batches) - shared
    prompts = sum(len(r.prompt_ids) for batch in batches for r in batch.rollouts)
    metrics: dict[str, float] = {
        "rollout/microbatches": len(batches),
        "rollout/padding": 1 - computed / rows,
        "rollout/prompt_tokens_shared": shared / prompts,
    }
    if packing.mask_truncated:
        metrics["rollout/masked_tokens"] = sum(int((batch.weights == 0).sum()) for batch in batches)
    return metrics
