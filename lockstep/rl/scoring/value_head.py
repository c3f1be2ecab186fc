"""The value function of PPO: a head on the policy's hidden states."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lockstep import ops
from lockstep.config import RLConfig, TrainConfig, algorithm_of
from lockstep.model import ScoringModel, TrainableModel
from lockstep.ops import one_order
from lockstep.parallel import World
from lockstep.parallel.exchange import without_gradient
from lockstep.parallel.one_order import target_product
from lockstep.rl.algorithms import explained_variance
from lockstep.rl.rollouts.records import Rollout
from lockstep.rl.scoring.forward import ForwardPasses
from lockstep.train.packing import PackedRow, predicting_states

NAME = "value_head"
"""Its parameters' prefix, in `train.rules` and in checkpoints."""


class ValueHead(nn.Module):
    """V of a state, in float32, from the hidden state that the next token is sampled from.

    It is initialized to zero, so the first step's advantages are sums of rewards. It uses the model's linear
    operator: like a log-probability, a value has the same bits in any batch, hence before and in the first update.
    """

    def __init__(self, dim: int, device: str | torch.device = "cpu", detached: bool = False, counts: bool = True):
        """counts: whether its gradients count; all tensor ranks have all states, so those of one rank suffice."""
        super().__init__()
        self.counts = counts
        self.weight = nn.Parameter(torch.zeros(1, dim + 1, dtype=torch.float32, device=device))
        """The last one is the bias, in units of `unit`: its gradient is summed like the others, in one order."""
        self.unit = math.sqrt(dim)
        """Scales the bias so that an update moves it as far as all weights: the initial error is mostly the mean."""
        self.detached = detached
        """Whether the value loss has no gradient into the model."""

    def forward(self, hidden: Float[Tensor, "states dim"]) -> Float[Tensor, "states"]:
        weight: Tensor = self.weight
        hidden = hidden.detach() if self.detached else hidden
        if not self.counts and torch.is_grad_enabled():
            weight = without_gradient(weight)
            # In one-order mode each rank takes its rows of a gradient that is already summed (`exchange.sum_gathered`).
            hidden = hidden if one_order.is_required() else without_gradient(hidden)
        states = F.pad(hidden.float(), (0, 1), value=self.unit)
        shares = torch.is_grad_enabled() and one_order.shared_targets() is not None
        return (target_product if shares else ops.linear)(states, weight)[:, 0]

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """By their names in the optimizer and in checkpoints."""
        return {f"{NAME}.{name}": parameter for name, parameter in self.named_parameters()}


def make_value_head(config: RLConfig, model: TrainableModel, world: World | None = None) -> ValueHead | None:
    """The value function of the run's algorithm; None if it has none."""
    if algorithm_of(config).advantage != "gae":
        return None
    counts = world is None or world.coordinate("tensor") == 0
    return ValueHead(model.config.dim, model.device, config.value_detached, counts)


def train_settings(config: RLConfig) -> TrainConfig:
    """The run's settings, with a separate learning rate for the value head; `train.rules` take precedence."""
    if algorithm_of(config).advantage != "gae":
        return config.train
    rule = f"{NAME}.* learning_rate={config.value_learning_rate}"
    return dataclasses.replace(config.train, rules=(rule, *config.train.rules))


class ValueScorer:
    """Scores rollouts with the value function."""

    def __init__(self, model: ScoringModel, value_head: ValueHead, forward: ForwardPasses):
        """model: the policy with the weights before the step."""
        self._model, self._critic, self._forward = model, value_head, forward

    def score(self, rollouts: Sequence[Rollout]) -> None:
        """Assigns V of the state in which each token was sampled."""

        def values(row: PackedRow) -> Tensor:
            return self._critic(predicting_states(self._model, row))

        for rollout, of_tokens in zip(rollouts, self._forward.per_token(rollouts, self._critic.weight.device, values)):
            rollout.scores.values = of_tokens


def value_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """How well the values before the step predicted the returns; empty without a value function."""
    values = [v for r in rollouts for v in r.scores.values]
    returns = [x for r in rollouts for x in r.scores.returns]
    return {"value/explained_variance": explained_variance(values, returns)} if values else {}
