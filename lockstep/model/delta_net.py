"""Linear attention: a gated delta network (arXiv 2412.06464), with Hugging Face's names."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from lockstep import ops
from lockstep.model.config import ModelConfig
from lockstep.model.layers import Projection, Weight


class DeltaNet(nn.Module):
    """Projections to what the recurrence reads and to the gate of its outputs, and the projection of these."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str | torch.device):
        super().__init__()
        assert config.delta is not None
        self.sizes = sizes = config.delta
        self.eps = config.norm_eps
        self.parts = (sizes.queries, sizes.queries, sizes.values)
        """The convolution's channels."""
        projection = partial(Projection, dtype=dtype, device=device)
        if sizes.fused:
            self.in_proj_qkvz = projection(sizes.channels + sizes.values, config.dim)
            self.in_proj_ba = projection(2 * sizes.value_heads, config.dim)
        else:
            self.in_proj_qkv = projection(sizes.channels, config.dim, parts=self.parts)
            self.in_proj_z = projection(sizes.values, config.dim)
            self.in_proj_b = projection(sizes.value_heads, config.dim)
            self.in_proj_a = projection(sizes.value_heads, config.dim)
        self.conv1d = Weight(sizes.channels, 1, sizes.width, dtype=dtype, device=device)
        self.A_log = nn.Parameter(torch.empty(sizes.value_heads, dtype=dtype, device=device))
        self.dt_bias = nn.Parameter(torch.empty(sizes.value_heads, dtype=dtype, device=device))
        self.norm = Weight(sizes.value_dim, dtype=dtype, device=device)
        self.out_proj = projection(config.dim, sizes.values)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The convolution's inputs `[tokens, channels]`, what strength and decay follow from `[tokens, value_heads]`
        each, and the gate `[tokens, values]`."""
        if self.sizes.fused:
            return self._split(self.in_proj_qkvz.project(x), self.in_proj_ba.project(x))
        mixed, gate = self.in_proj_qkv.project(x), self.in_proj_z.project(x)
        return mixed, self.in_proj_b.project(x), self.in_proj_a.project(x), gate

    def _split(self, qkvz: Tensor, ba: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The parts of products whose outputs are grouped by key head."""
        sizes, group = self.sizes, self.sizes.value_heads // self.sizes.key_heads
        values = group * sizes.value_dim
        rows = qkvz.view(len(qkvz), -1, 2 * sizes.key_dim + 2 * values)
        *mixed, gate = (part.flatten(1) for part in rows.split((sizes.key_dim, sizes.key_dim, values, values), 2))
        b, a = (part.flatten(1) for part in ba.view(len(ba), -1, 2 * group).split(group, 2))
        return torch.cat(mixed, 1), b, a, gate

    def terms(self) -> ops.DeltaTerms:
        """The recurrence's parameters: this rank's heads."""
        conv = ops.own_rows(self.conv1d.weight, self.parts)
        rates, bias = (ops.own_part(weight) for weight in (self.A_log, self.dt_bias))
        heads = self.sizes.key_heads * len(rates) // self.sizes.value_heads
        return ops.DeltaTerms(conv.squeeze(1), rates, bias, heads, self.sizes.key_dim)

    def values(self, outputs: Tensor, gate: Tensor | None) -> Tensor:
        """The gated norm of each head's outputs, `[tokens, values]`."""
        assert gate is not None
        return ops.silu_mul(gate, ops.rms_norm(outputs, self.norm.weight, self.eps).flatten(1))
