"""A step's rollouts with drawn log-probabilities, and the inputs of its loss in float64."""

from dataclasses import dataclass, fields, replace

import torch

from lockstep.config import ALGORITHMS
from lockstep.rl import Example, PolicyLossInputs, objective, token_weights
from lockstep.rl.rollouts.advantages import assign_advantages
from lockstep.rl.rollouts.records import Rollout, Scores

LIMIT = 9
"""Tokens that a completion may have."""


@dataclass
class Step:
    """Completions of several prompts, group by group."""

    groups: list[list[float]]
    """Rewards."""
    lengths: list[int]
    new: list[torch.Tensor]
    old: list[torch.Tensor]
    reference: list[torch.Tensor]
    teacher: list[torch.Tensor]
    sampler: list[torch.Tensor]
    entropies: list[torch.Tensor]
    values: list[torch.Tensor]
    new_values: list[torch.Tensor]

    @property
    def rewards(self):
        return [reward for group in self.groups for reward in group]


def drawn_step(seed=0, prompts=3, samples=4, spread=0.3):
    """float64 log-probabilities that float32 holds too, so that what the run keeps in float32 is what is drawn."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, LIMIT + 1, (prompts * samples,), generator=draw).tolist()
    groups = torch.randint(0, 5, (prompts, samples), generator=draw).div(4).tolist()
    groups[0] = [0.25, 1.0, 0.0, 0.25][:samples]

    def near(center, by):
        return [(c + by * torch.randn(len(c), generator=draw)).float().double() for c in center]

    old = [-2 * torch.rand(n, generator=draw).double() - 0.1 for n in lengths]
    old = near(old, 0.0)
    step = Step(
        groups, lengths, near(old, spread), old, near(old, 0.2), near(old, 0.5), near(old, 0.4),
        near([c.abs() for c in old], 0.0), [], [],
    )  # fmt: skip
    step.values = near([torch.full_like(c, 0.4) for c in old], 0.3)
    step.new_values = near(step.values, 0.3)
    return step


def rollouts_of(step):
    samples = len(step.groups[0])
    return [
        Rollout(
            Example("p"), index // samples, [1, 2], [3] * n, step.old[index].tolist(), "stop", "", 0,
            scores=Scores(
                reward=step.rewards[index], reference_logprobs=step.reference[index].tolist(),
                teacher_logprobs=step.teacher[index].tolist(), values=step.values[index].tolist(),
            ),
        )
        for index, n in enumerate(step.lengths)
    ]  # fmt: skip


def inputs_of(step, algorithm, **given):
    """What the loss of the whole step gets, as float64 tensors; `log_probs` is a leaf with a gradient."""
    rollouts = rollouts_of(step)
    assign_advantages(rollouts, algorithm)
    lengths = step.lengths
    if algorithm.advantage == "best":  # what is not the best is not trained on
        lengths = [n if r.scores.advantage else 0 for n, r in zip(lengths, rollouts)]
    kept = [index for index, n in enumerate(lengths) if n]
    chosen = [rollouts[index] for index in kept]

    def joined(of_each):
        return torch.cat([of_each[index] for index in kept])

    values = {}
    if algorithm.advantage == "gae":
        returns = torch.tensor([x for r in chosen for x in r.scores.returns], dtype=torch.float64)
        current = joined(step.new_values).requires_grad_()
        values = {"values": current, "old_values": joined(step.values), "returns": returns}
    return PolicyLossInputs(
        log_probs=joined(step.new).requires_grad_(),
        old_log_probs=joined(step.old),
        advantages=torch.tensor([a for r in chosen for a in r.advantages_of_tokens()], dtype=torch.float64),
        weights=torch.cat(token_weights([lengths[i] for i in kept], algorithm.loss_average, LIMIT)).double(),
        reference_log_probs=joined(step.reference) if algorithm.kl_coefficient else None,
        lengths=[lengths[index] for index in kept],
        sampler_log_probs=joined(step.sampler) if algorithm.off_policy != "none" else None,
        entropies=joined(step.entropies).requires_grad_(),
        **values,
    )


def sliced(inputs, first, last):
    """The inputs of completions `first` to `last` alone."""
    begin, end = sum(inputs.lengths[:first]), sum(inputs.lengths[:last])
    parts = {
        f.name: value.detach()[begin:end].clone()
        for f in fields(inputs)
        if isinstance(value := getattr(inputs, f.name), torch.Tensor)
    }
    for leaf in parts.keys() & {"log_probs", "entropies", "values"}:
        parts[leaf].requires_grad_()
    return replace(inputs, **parts, lengths=inputs.lengths[first:last])


def loss_and_gradient(inputs, algorithm):
    loss, metrics = objective(inputs, algorithm)
    loss.backward()
    return loss.detach(), inputs.log_probs.grad, metrics


def named(name, **changes):
    return replace(ALGORITHMS[name], **changes)
