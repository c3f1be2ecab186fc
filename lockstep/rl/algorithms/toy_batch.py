"""Tries a user's loss and advantages on a few made-up completions before a run samples its first."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.config import Algorithm
from lockstep.errors import UserError
from lockstep.rl.algorithms.losses import PolicyLossInputs, token_weights
from lockstep.rl.algorithms.own import AdvantageInputs, OwnAdvantages, OwnLoss

LENGTHS = (1, 4, 2, 3)
"""Tokens of the completions; one is a single token."""
ADVANTAGES = (1.5, -0.5, 0.0, -1.0)
STATELESS = "make it a function of its inputs alone, without state or random numbers"


def check_loss(own: OwnLoss, algorithm: Algorithm, device: torch.device) -> None:
    """Calls the loss on policy, where all ratios are 1, and off policy, with the inputs that the algorithm's runs have.

    Raises UserError as `OwnLoss` does, for losses, metrics and gradients that are not finite, if no gradient arrives at
    `log_probs`, and for a function that changes its inputs or returns other numbers when called again.
    """
    arrived = False
    for off_policy in (0.0, 0.3):
        inputs = _loss_inputs(algorithm, device, off_policy)
        when = "off policy" if off_policy else "on policy (log_probs equal to old_log_probs)"
        before = [tensor.detach().clone() for tensor in _tensors(inputs)]
        losses, metrics = own(inputs)
        if any(not torch.equal(old, new.detach()) for old, new in zip(before, _tensors(inputs))):
            raise UserError(f"{own.where} changes its inputs; compute new tensors instead of writing into them")
        numbers = [losses.detach(), *(torch.as_tensor(value).detach() for value in metrics.values())]
        for name, value in zip(["a loss", *(f"the metric {name}" for name in metrics)], numbers):
            if not bool(torch.isfinite(value).all()):
                raise UserError(
                    f"{own.where} returns {name} that is not finite for a toy batch {when}: {value.tolist()}; correct "
                    "it, for example by bounding what is divided by or exponentiated"
                )
        (gradient,) = torch.autograd.grad((losses * inputs.weights).sum(), inputs.log_probs, allow_unused=True)
        if gradient is not None and not bool(torch.isfinite(gradient).all()):
            raise UserError(
                f"{own.where} has a gradient that is not finite for a toy batch {when}: {gradient.tolist()}; correct it"
            )
        arrived = arrived or (gradient is not None and bool(gradient.any()))
        again, metrics_again = own(inputs)
        repeated = [again.detach(), *(torch.as_tensor(value).detach() for value in metrics_again.values())]
        if list(metrics) != list(metrics_again) or not all(map(torch.equal, numbers, repeated)):
            raise UserError(f"{own.where} returns other numbers for the same inputs; {STATELESS}")
    if not arrived:
        raise UserError(
            f"{own.where} has no gradient to inputs.log_probs, so the policy would learn nothing; use them in the loss"
        )


def _loss_inputs(algorithm: Algorithm, device: torch.device, off_policy: float) -> PolicyLossInputs:
    draw = torch.Generator().manual_seed(0)

    def drawn(scale: float) -> Tensor:
        return (scale * torch.randn(sum(LENGTHS), generator=draw)).to(device)

    old = -0.1 - drawn(2.0).abs()
    has_values = algorithm.advantage == "gae"
    return PolicyLossInputs(
        log_probs=(old + off_policy * drawn(1.0)).requires_grad_(),
        old_log_probs=old,
        advantages=torch.tensor([a for a, n in zip(ADVANTAGES, LENGTHS) for _ in range(n)], device=device),
        weights=torch.cat(token_weights(LENGTHS, algorithm.loss_average, max(LENGTHS))).to(device),
        reference_log_probs=old + drawn(0.2) if algorithm.kl_coefficient > 0 else None,
        lengths=LENGTHS,
        sampler_log_probs=old + drawn(0.1) if algorithm.off_policy != "none" else None,
        entropies=drawn(1.0).abs().requires_grad_(),
        values=drawn(1.0).requires_grad_() if has_values else None,
        old_values=drawn(1.0) if has_values else None,
        returns=drawn(1.0) if has_values else None,
    )


def _tensors(inputs: PolicyLossInputs) -> list[Tensor]:
    values = (getattr(inputs, field.name) for field in dataclasses.fields(inputs))
    return [value for value in values if isinstance(value, Tensor)]


def check_advantages(own: OwnAdvantages, algorithm: Algorithm, samples: int, has_teacher: bool) -> None:
    """Calls the function on three groups: of `samples`, of as many with equal rewards, and of one less, as if a reward
    had failed.

    Raises UserError as `advantages_of_groups` does, for a function that returns other advantages when called again, and
    for advantages per token if the loss takes one per completion.
    """
    inputs = _advantage_inputs(samples, algorithm.kl_coefficient > 0, has_teacher)
    advantages = own(inputs)
    if advantages != own(inputs):
        raise UserError(f"{own.where} returns other numbers for the same inputs; {STATELESS}")
    if algorithm.loss == "clip_sequence" and isinstance(advantages[0][0], list):
        raise UserError(
            f"loss clip_sequence takes one advantage per completion, but {own.where} returns one per token; set "
            'loss = "clip"'
        )


def _advantage_inputs(samples: int, has_reference: bool, has_teacher: bool) -> AdvantageInputs:
    draw = torch.Generator().manual_seed(0)
    sizes = (samples, samples, max(samples - 1, 2))
    lengths = [[LENGTHS[index % len(LENGTHS)] for index in range(size)] for size in sizes]

    def drawn() -> Sequence[Sequence[Tensor]]:
        return [[-torch.rand(tokens, generator=draw) - 0.1 for tokens in of_group] for of_group in lengths]

    rewards = [torch.rand(size, generator=draw, dtype=torch.float64) for size in sizes]
    rewards[1].fill_(1.0)
    return AdvantageInputs(
        rewards, lengths, drawn(), drawn() if has_reference else None, drawn() if has_teacher else None
    )
