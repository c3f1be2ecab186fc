"""The two halves of a block around attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lockstep import ops
from lockstep.model.config import ModelConfig


class Weight(nn.Module):
    """A parameter that an operator of `ops` reads; named as Hugging Face names it: `….weight`, and `….bias`."""

    def __init__(self, *shape: int, dtype: torch.dtype, device: str | torch.device, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(shape[0], dtype=dtype, device=device)) if bias else None

    def project(self, x: Tensor, chunks: int = 1) -> Tensor:
        """The product with the weight, and the bias where there is one."""
        out = ops.linear(x, self.weight, chunks)
        return out if self.bias is None else ops.add_bias(out, self.bias)


class Attention(nn.Module):
    """Projections to queries, keys and values, and back; and what the layer asks of attention."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str | torch.device, window: int):
        super().__init__()
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.config, self.window = config, window
        self.q_proj = Weight(queries, config.dim, dtype=dtype, device=device, bias=config.attention_bias)
        self.k_proj = Weight(keys, config.dim, dtype=dtype, device=device, bias=config.attention_bias)
        self.v_proj = Weight(keys, config.dim, dtype=dtype, device=device, bias=config.attention_bias)
        self.o_proj = Weight(config.dim, queries, dtype=dtype, device=device, bias=config.attention_bias)
        if config.sinks:
            self.sinks = nn.Parameter(torch.empty(config.num_heads, dtype=dtype, device=device))
        if config.qk_norm:
            self.q_norm = Weight(config.head_dim, dtype=dtype, device=device)
            self.k_norm = Weight(config.head_dim, dtype=dtype, device=device)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values: `[tokens, heads, head_dim]` each."""
        head_dim = self.config.head_dim
        q = self.q_proj.project(x).view(x.shape[0], -1, head_dim)
        k = self.k_proj.project(x).view(x.shape[0], -1, head_dim)
        v = self.v_proj.project(x).view(x.shape[0], -1, head_dim)
        if self.config.qk_norm:
            q = ops.rms_norm(q, self.q_norm.weight, self.config.norm_eps)
            k = ops.rms_norm(k, self.k_norm.weight, self.config.norm_eps)
        return ops.rotary(q, cos, sin), ops.rotary(k, cos, sin), v

    def values(self, attended: Tensor) -> Tensor:
        """What the heads have attended to, `[tokens, heads · head_dim]`."""
        return attended.flatten(1)

    def terms(self) -> ops.Terms:
        """What attention is called with beside queries, keys and values."""
        return ops.Terms(window=self.window, sinks=ops.own_part(self.sinks) if self.config.sinks else None)


class FeedForward(nn.Module):
    """The gated feed-forward, of the model's intermediate size unless another is given."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str | torch.device, size: int = 0):
        super().__init__()
        size = size or config.intermediate_size
        self.chunks = config.reduction_chunks
        self.gate_proj = Weight(size, config.dim, dtype=dtype, device=device)
        self.up_proj = Weight(size, config.dim, dtype=dtype, device=device)
        self.down_proj = Weight(config.dim, size, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        gated = ops.silu_mul(ops.linear(x, self.gate_proj.weight), ops.linear(x, self.up_proj.weight))
        return ops.linear(gated, self.down_proj.weight, self.chunks)
