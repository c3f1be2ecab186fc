"""The feed-forward as a mixture of experts: a router, its experts, and a shared one for all tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lockstep import ops
from lockstep.model.config import ModelConfig
from lockstep.model.layers import FeedForward, Weight


class Router(Weight):
    """One logit per expert, and an optional bias for the choice."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str | torch.device):
        assert config.experts is not None
        super().__init__(config.experts.count, config.dim, dtype=dtype, device=device, bias=config.experts.clamped)
        self.routing = config.experts.routing
        self.load = ops.ExpertLoad(config.experts.count, config.experts.routing.active)
        self.e_score_correction_bias: nn.Parameter | None = None
        if config.experts.choice_bias:
            # Always float32: the load-balancing steps are far below bfloat16's resolution.
            bias = torch.empty(config.experts.count, dtype=torch.float32, device=device)
            self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The weights and the indices of each token's experts."""
        logits = ops.router_logits(x, self.weight)
        if self.bias is not None:
            logits = ops.add_bias(logits, self.bias)
        return ops.route(logits, self.routing, self.e_score_correction_bias, self.load)


class StackedWeight(Weight):
    """All experts' weights of one product, `[experts, out, in]`."""

    def __init__(self, *shape: int, dtype: torch.dtype, device: str | torch.device):
        super().__init__(*shape, dtype=dtype, device=device)
        self.precision = ops.NONE
        """What the product computes in: a key of `ops.FORMATS`."""


class Experts(nn.Module):
    """All experts' gated feed-forwards, each weight stacked: `[experts, out, in]`."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str | torch.device):
        super().__init__()
        assert config.experts is not None
        count, size = config.experts.count, config.experts.intermediate_size
        self.gate_proj = StackedWeight(count, size, config.dim, dtype=dtype, device=device)
        self.up_proj = StackedWeight(count, size, config.dim, dtype=dtype, device=device)
        self.down_proj = StackedWeight(count, config.dim, size, dtype=dtype, device=device)

    def forward(
        self, x: Tensor, weights: Tensor, chosen: Tensor, shared: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        formats = (gate.precision, up.precision, down.precision)
        return ops.experts(x, weights, chosen, gate.weight, up.weight, down.weight, shared, formats)


class MixtureOfExperts(nn.Module):
    """The weighted experts of each token, and the shared one if there is one, by its family's name."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str | torch.device):
        super().__init__()
        assert config.experts is not None
        self.gate = Router(config, dtype, device)
        self.experts = Experts(config, dtype, device)
        self.is_shared_gated = config.experts.shared_gate
        if not config.experts.shared_size:
            return
        shared = FeedForward(config, dtype, device, config.experts.shared_size)
        if self.is_shared_gated:
            self.shared_expert = shared
            self.shared_expert_gate = Weight(1, config.dim, dtype=dtype, device=device)
        else:
            self.shared_experts = shared

    @property
    def shared(self) -> Callable[[Tensor], Tensor] | None:
        """The feed-forward of all tokens."""
        return self._gated if self.is_shared_gated else getattr(self, "shared_experts", None)

    def _gated(self, x: Tensor) -> Tensor:
        # Over tensor ranks, `x` has all rows; the logits and the expert's outputs are those of this rank's share.
        return ops.row_gate(ops.router_logits(x, self.shared_expert_gate.weight), self.shared_expert(x))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.experts(x, *self.gate(x), self.shared)
        return out


class ClampedExperts(nn.Module):
    """All of gpt-oss's experts, stacked, with Hugging Face's names, but `[experts, out, in]`. Each of the two products
    has a precision, a key of `ops.FORMATS`."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str | torch.device):
        super().__init__()
        assert config.experts is not None
        count, size, dim = config.experts.count, config.experts.intermediate_size, config.dim
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * size, dim, dtype=dtype, device=device))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(count, 2 * size, dtype=dtype, device=device))
        self.down_proj = nn.Parameter(torch.empty(count, dim, size, dtype=dtype, device=device))
        self.down_proj_bias = nn.Parameter(torch.empty(count, dim, dtype=dtype, device=device))
        self.gate_up_precision = self.down_precision = ops.NONE

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        gate_up, down = (self.gate_up_proj, self.gate_up_proj_bias), (self.down_proj, self.down_proj_bias)
        return ops.clamped_experts(x, weights, chosen, *gate_up, *down, (self.gate_up_precision, self.down_precision))


class ClampedMixture(nn.Module):
    """gpt-oss's feed-forward: the weighted experts of each token."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str | torch.device):
        super().__init__()
        self.router = Router(config, dtype, device)
        self.experts = ClampedExperts(config, dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.experts(x, *self.router(x))
        return out


def feed_forward_of(config: ModelConfig, layer: int, dtype: torch.dtype, device: str | torch.device) -> nn.Module:
    """The layer's feed-forward: dense, or a mixture."""
    if config.is_dense(layer) or config.experts is None:
        return FeedForward(config, dtype, device)
    return (ClampedMixture if config.experts.clamped else MixtureOfExperts)(config, dtype, device)
