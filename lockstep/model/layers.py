"""The two halves of a block around attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lockstep import ops
from lockstep.model.config import ModelConfig


class Weight(nn.Module):
    """A parameter that an operator of `ops` reads; named as Hugging Face names it: `….weight`."""

    def __init__(self, *shape: int, dtype: torch.dtype, device: str | torch.device):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))


class Attention(nn.Module):
    """Projections to queries, keys and values, and back."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str | torch.device):
        super().__init__()
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.config = config
        self.q_proj = Weight(queries, config.dim, dtype=dtype, device=device)
        self.k_proj = Weight(keys, config.dim, dtype=dtype, device=device)
        self.v_proj = Weight(keys, config.dim, dtype=dtype, device=device)
        self.o_proj = Weight(config.dim, queries, dtype=dtype, device=device)
        if config.qk_norm:
            self.q_norm = Weight(config.head_dim, dtype=dtype, device=device)
            self.k_norm = Weight(config.head_dim, dtype=dtype, device=device)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values: `[tokens, heads, head_dim]` each."""
        head_dim = self.config.head_dim
        q = ops.linear(x, self.q_proj.weight).view(x.shape[0], -1, head_dim)
        k = ops.linear(x, self.k_proj.weight).view(x.shape[0], -1, head_dim)
        v = ops.linear(x, self.v_proj.weight).view(x.shape[0], -1, head_dim)
        if self.config.qk_norm:
            q = ops.rms_norm(q, self.q_norm.weight, self.config.norm_eps)
            k = ops.rms_norm(k, self.k_norm.weight, self.config.norm_eps)
        return ops.rotary(q, cos, sin), ops.rotary(k, cos, sin), v


class FeedForward(nn.Module):
    """The gated feed-forward."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str | torch.device):
        super().__init__()
        self.chunks = config.reduction_chunks
        self.gate_proj = Weight(config.intermediate_size, config.dim, dtype=dtype, device=device)
        self.up_proj = Weight(config.intermediate_size, config.dim, dtype=dtype, device=device)
        self.down_proj = Weight(config.dim, config.intermediate_size, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        gated = ops.silu_mul(ops.linear(x, self.gate_proj.weight), ops.linear(x, self.up_proj.weight))
        return ops.linear(gated, self.down_proj.weight, self.chunks)
