"""The parts of a block around attention: projections with their adapters, and the dense feed-forward."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lockstep import ops
from lockstep.errors import UserError
from lockstep.model.config import Lora, ModelConfig
from lockstep.model.stored import is_score_head


class Weight(nn.Module):
    """A parameter that an operator of `ops` reads, with Hugging Face's names: `….weight`, and `….bias`."""

    def __init__(self, *shape: int, dtype: torch.dtype, device: str | torch.device, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(shape[0], dtype=dtype, device=device)) if bias else None


class Projection(Weight):
    """A linear layer with weight `[out, in]`, and its low-rank adapter, if any."""

    lora_A: Weight | None
    lora_B: Weight | None

    def __init__(self, *shape: int, dtype: torch.dtype, device: str | torch.device, bias: bool = False):
        super().__init__(*shape, dtype=dtype, device=device, bias=bias)
        self.register_module("lora_A", None)
        self.register_module("lora_B", None)
        self.scaling, self.adapted = 0.0, False
        self.precision = ops.NONE
        """What the product with the weight, but not an adapter's, computes in: a key of `ops.FORMATS`."""

    def project(self, x: Tensor, chunks: int = 1) -> Tensor:
        """The product with the weight, plus the bias if there is one, and the adapter's update if it is on.

        Both products of the adapter are rounded to the model's dtype, as are the scaled update and the sum: four
        roundings, each in a separate operator, so that a row's bits are the same in any batch. A `B` of zeros adds
        zeros: the values are those without an adapter.
        """
        out = product(x, self.weight, self.precision, chunks)
        out = out if self.bias is None else ops.add_bias(out, self.bias)
        if not self.adapted or self.lora_A is None or self.lora_B is None:
            return out
        return out + ops.linear(ops.linear(x, self.lora_A.weight), self.lora_B.weight) * self.scaling


def product(x: Tensor, weight: Tensor, format: str, chunks: int = 1) -> Tensor:
    """The product with factors in a format, a key of `ops.FORMATS`."""
    return ops.linear(x, weight, chunks) if format == ops.NONE else ops.formatted_linear(x, weight, format, chunks)


class Attention(nn.Module):
    """Projections to queries, keys and values, the output projection, and the layer's other attention parameters."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str | torch.device, window: int):
        super().__init__()
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.config, self.window = config, window
        self.cache = ops.NONE
        """What keys and values are rounded to: the numbers of the generator's cache, or the model's dtype."""
        self.q_proj = Projection(queries, config.dim, dtype=dtype, device=device, bias=config.attention_bias)
        self.k_proj = Projection(keys, config.dim, dtype=dtype, device=device, bias=config.attention_bias)
        self.v_proj = Projection(keys, config.dim, dtype=dtype, device=device, bias=config.attention_bias)
        self.o_proj = Projection(config.dim, queries, dtype=dtype, device=device, bias=config.attention_bias)
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
        q, k = ops.rotary(q, cos, sin), ops.rotary(k, cos, sin)
        return (q, k, v) if self.cache == ops.NONE else (q, ops.cache_rounded(k), ops.cache_rounded(v))

    def values(self, attended: Tensor) -> Tensor:
        """The attended values of all heads, `[tokens, heads · head_dim]`."""
        return attended.flatten(1)

    def terms(self) -> ops.Terms:
        """Attention's parameters other than queries, keys and values."""
        return ops.Terms(window=self.window, sinks=ops.own_part(self.sinks) if self.config.sinks else None)


class FeedForward(nn.Module):
    """The gated feed-forward; `size` defaults to the model's intermediate size."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str | torch.device, size: int = 0):
        super().__init__()
        size = size or config.intermediate_size
        self.chunks = config.reduction_chunks
        self.gate_proj = Projection(size, config.dim, dtype=dtype, device=device)
        self.up_proj = Projection(size, config.dim, dtype=dtype, device=device)
        self.down_proj = Projection(config.dim, size, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        gated = ops.silu_mul(self.gate_proj.project(x), self.up_proj.project(x))
        return self.down_proj.project(gated, self.chunks)


def add_adapter(model: nn.Module, lora: Lora, dtype: torch.dtype, device: str | torch.device) -> None:
    """Adds the uninitialized weights of an adapter to its layers, and freezes all others but a reward model's head.

    The adapter (LoRA, arXiv 2106.09685) is part of the one forward: trainer and generator compute it with the same
    operators in the same order, unmerged, so their bits agree. With the adapter off, the model is its base.

    Raises UserError for a layer that does not exist, and for a rank larger than a layer's matrix.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_score_head(name))
    layers = dict(projections(model))
    for name in lora.modules:
        if name not in layers:
            raise UserError(f"the adapter is for a layer {name}, which this model does not have; give its own base")
        layer = layers[name]
        outputs, inputs = layer.weight.shape
        refuse_rank(lora.rank, name, layer)
        layer.lora_A = Weight(lora.rank, inputs, dtype=dtype, device=device)
        layer.lora_B = Weight(outputs, lora.rank, dtype=dtype, device=device)
        layer.scaling, layer.adapted = lora.scaling, True


def projections(model: nn.Module) -> Iterator[tuple[str, Projection]]:
    """The layers that can have an adapter, by name."""
    for name, module in model.named_modules():
        if isinstance(module, Projection):
            yield name, module


def refuse_rank(rank: int, name: str, layer: Projection) -> None:
    """Raises UserError for a rank larger than the layer's matrix."""
    outputs, inputs = layer.weight.shape
    if not 1 <= rank <= min(outputs, inputs):
        raise UserError(
            f"lora.rank is {rank}, but {name} is {outputs} x {inputs}; give 1 to {min(outputs, inputs)}, or leave the "
            "layer out of lora.targets"
        )
