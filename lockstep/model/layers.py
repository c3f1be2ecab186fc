"""Linear layers with their adapters, the parts of a block around attention, and the dense feed-forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from lockstep import ops
from lockstep.errors import UserError
from lockstep.model.adapted_rows import adapted_rows
from lockstep.model.config import Lora, ModelConfig
from lockstep.model.stored import is_score_head

NARROW = (".in_proj_a", ".in_proj_b", ".in_proj_ba")


class Weight(nn.Module):
    """A parameter that an operator of `ops` reads, with Hugging Face's names: `….weight`, and `….bias`."""

    def __init__(self, *shape: int, dtype: torch.dtype, device: str | torch.device, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(shape[0], dtype=dtype, device=device)) if bias else None


class Norm(Weight):
    """RMSNorm over `size` features, by default the residual stream's.

    Without weights (`plain_norms`) it has ones, which are neither trained nor in files: over tensor ranks, an operator
    follows the placement of its weight.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str | torch.device, size: int = 0):
        super().__init__(size or config.dim, dtype=dtype, device=device)
        self.weight.requires_grad_(not config.plain_norms)
        self.eps, self.offset = config.norm_eps, config.norm_offset

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps, self.offset)

    def of_heads(self, x: Tensor) -> Tensor:
        """The norm of all heads' features together."""
        return ops.heads_norm(x, self.weight, self.eps, self.offset)

    def of_branch(self, x: Tensor) -> Tensor:
        """The norm of what is added to the residual stream, whose rows stay on their ranks."""
        return ops.branch_norm(x, self.weight, self.eps, self.offset)


class Adaptable(nn.Module):
    """A linear layer's low-rank adapter, if any, and those of the rows in a forward pass."""

    lora_A: Weight | None
    lora_B: Weight | None

    def __init__(self, outputs: int, inputs: int):
        super().__init__()
        self.shape = outputs, inputs
        """Of the layer's weight in the whole model."""
        self.register_module("lora_A", None)
        self.register_module("lora_B", None)
        self.scaling, self.adapted = 0.0, False
        self.name = ""
        """In the whole model, such as `layers.0.mlp.up_proj`: adapters have their matrices by it."""

    def updates(self) -> tuple[ops.LowRank, ...]:
        """What is added to the product: the adapter's update if it is on, and those of `adapted_rows`."""
        found = []
        if self.adapted and self.lora_A is not None and self.lora_B is not None:
            found.append(ops.LowRank(self.lora_A.weight, self.lora_B.weight, self.scaling))
        for adapter, rows in adapted_rows():
            if (matrices := adapter.matrices.get(self.name)) is not None:
                a, b = matrices
                found.append(ops.LowRank(a.weight, b.weight, adapter.scaling, rows))
        return tuple(found)


class Head(Adaptable):
    """The output head. A tied one has no weight of its own, but may have an adapter: the embedding has none."""

    weight: nn.Parameter | None

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str | torch.device):
        super().__init__(config.vocab_size, config.dim)
        weight = None if config.tie_embeddings else nn.Parameter(torch.empty(*self.shape, dtype=dtype, device=device))
        self.register_parameter("weight", weight)


class Projection(Adaptable):
    """A linear layer with weight `[out, in]` and its adapters."""

    bias: nn.Parameter | None

    def __init__(
        self,
        outputs: int,
        inputs: int,
        dtype: torch.dtype,
        device: str | torch.device,
        bias: bool = False,
        parts: tuple[int, ...] = (),
    ):
        super().__init__(outputs, inputs)
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype, device=device)) if bias else None
        self.parts = parts
        """Rows of the several projections that it is in one weight, whose outputs tensor ranks share; empty: one."""
        self.precision = ops.NONE
        """What the product with the weight, but not an adapter's, computes in: a key of `ops.FORMATS`."""

    def project(self, x: Tensor, chunks: int = 1) -> Tensor:
        """The product with the weight, plus the bias if there is one, and `updates`. A `B` of zeros adds zeros: the
        values are those without an adapter."""
        if self.parts:
            out = ops.fused_linear(x, self.weight, self.parts, self.precision)
        else:
            out = product(x, self.weight, self.precision, chunks)
        out = out if self.bias is None else ops.add_bias(out, self.bias)
        for update in self.updates():
            out = ops.add_low_rank(out, x, *update)
        return out


def product(x: Tensor, weight: Tensor, format: str, chunks: int = 1) -> Tensor:
    """The product with factors in a format, a key of `ops.FORMATS`."""
    return ops.linear(x, weight, chunks) if format == ops.NONE else ops.formatted_linear(x, weight, format, chunks)


class Attention(nn.Module):
    """Projections to queries, keys and values, the output projection, and the layer's other attention parameters."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype, device: str | torch.device):
        super().__init__()
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.config, self.window, self.is_rotated = config, config.window(layer), config.is_rotated(layer)
        self.cache = ops.NONE
        """What keys and values are rounded to: the numbers of the generator's cache, or the model's dtype."""
        projection = partial(Projection, dtype=dtype, device=device, bias=config.qkv_bias)
        if "qkv_proj" in config.fused:
            parts = (queries, keys, keys)
            self.qkv_proj = projection(sum(parts), config.dim, parts=parts)
        else:
            self.q_proj = projection(2 * queries if config.attention_gate else queries, config.dim)
            self.k_proj = projection(keys, config.dim)
            self.v_proj = projection(keys, config.dim)
        self.o_proj = Projection(config.dim, queries, dtype=dtype, device=device, bias=config.output_bias)
        if config.sinks:
            self.sinks = nn.Parameter(torch.empty(config.num_heads, dtype=dtype, device=device))
        if config.qk_norm != "none":
            whole = config.qk_norm == "all heads"
            self.q_norm = Norm(config, dtype, device, queries if whole else config.head_dim)
            self.k_norm = Norm(config, dtype, device, keys if whole else config.head_dim)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Rotated queries and keys, and values: `[tokens, heads, head_dim]` each; and the gate, if there is one,
        `[tokens, heads · head_dim]`."""
        q, k, v = (each.view(x.shape[0], -1, self.config.head_dim) for each in self._projected(x))
        gate = None
        if self.config.attention_gate:
            q, gate = q.unflatten(1, (-1, 2)).unbind(2)
            q, gate = q.contiguous(), gate.flatten(1)
        if self.config.qk_norm == "all heads":
            q, k = self.q_norm.of_heads(q), self.k_norm.of_heads(k)
        elif self.config.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.is_rotated:
            q, k = self._rotated(q, k, cos, sin)
        if self.cache != ops.NONE:
            k, v = ops.cache_rounded(k), ops.cache_rounded(v)
        return q, k, v, gate

    def _projected(self, x: Tensor) -> Sequence[Tensor]:
        if "qkv_proj" not in self.config.fused:
            return [each.project(x) for each in (self.q_proj, self.k_proj, self.v_proj)]
        return ops.parts_of(self.qkv_proj.project(x), self.qkv_proj.parts)

    def _rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        neighbors = self.config.rope_interleaved
        of_keys = of_queries = cos, sin
        if self.config.long_queries is not None:
            of_keys, of_queries = ((cos[:, kind].contiguous(), sin[:, kind].contiguous()) for kind in (0, 1))
        return ops.rotary(q, *of_queries, neighbors), ops.rotary(k, *of_keys, neighbors)

    def values(self, attended: Tensor, gate: Tensor | None) -> Tensor:
        """The attended values of all heads, `[tokens, heads · head_dim]`."""
        return attended.flatten(1) if gate is None else ops.sigmoid_mul(gate, attended.flatten(1))

    def terms(self) -> ops.Terms:
        """Attention's parameters other than queries, keys and values."""
        sinks = ops.own_part(self.sinks) if self.config.sinks else None
        return ops.Terms(self.config.attention_scale, self.window, sinks)


class FeedForward(nn.Module):
    """The dense feed-forward, with a gate or without; `size` defaults to the model's intermediate size."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str | torch.device, size: int = 0):
        super().__init__()
        size, bias = size or config.intermediate_size, config.mlp_bias
        self.chunks = config.reduction_chunks
        self.activation, self.is_fused = config.activation, "gate_up_proj" in config.fused
        projection = partial(Projection, dtype=dtype, device=device, bias=bias)
        if self.is_fused:
            self.gate_up_proj = projection(2 * size, config.dim, parts=(size, size))
        else:
            if config.is_gated:
                self.gate_proj = projection(size, config.dim)
            self.up_proj = projection(size, config.dim)
        self.down_proj = projection(config.dim, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj.project(self._activated(x), self.chunks)

    def _activated(self, x: Tensor) -> Tensor:
        if self.activation == "relu_squared":
            return ops.relu_squared(self.up_proj.project(x))
        if self.is_fused:
            gate, up = ops.parts_of(self.gate_up_proj.project(x), self.gate_up_proj.parts)
        else:
            gate, up = self.gate_proj.project(x), self.up_proj.project(x)
        return ops.gelu_mul(gate, up) if self.activation == "gelu_tanh" else ops.silu_mul(gate, up)


def add_adapter(model: nn.Module, lora: Lora, dtype: torch.dtype, device: str | torch.device) -> None:
    """Adds the uninitialized weights of an adapter to its layers, and freezes all others but a reward model's head.

    The adapter (LoRA, arXiv 2106.09685) is part of the one forward: trainer and generator compute it with the same
    operators in the same order, unmerged, so their bits agree. With the adapter off, the model is its base.

    Raises UserError for a layer that does not exist, and for a rank larger than a layer's matrix.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_score_head(name))
    layers = dict(adaptable(model))
    for name in lora.modules:
        if name not in layers:
            raise UserError(f"the adapter is for a layer {name}, which this model does not have; give its own base")
        layer = layers[name]
        outputs, inputs = layer.shape
        refuse_rank(lora.rank, name, layer)
        layer.lora_A = Weight(lora.rank, inputs, dtype=dtype, device=device)
        layer.lora_B = Weight(outputs, lora.rank, dtype=dtype, device=device)
        layer.scaling, layer.adapted = lora.scaling, True


def adaptable(model: nn.Module) -> Iterator[tuple[str, Adaptable]]:
    """The layers that can have an adapter, by name: the projections, and the head last."""
    for name, module in model.named_modules():
        if isinstance(module, Adaptable):
            yield name, module


def projections(model: nn.Module) -> Iterator[tuple[str, Projection]]:
    """The linear layers of the blocks, by name."""
    for name, module in model.named_modules():
        if isinstance(module, Projection):
            yield name, module


def is_narrow(name: str) -> bool:
    """Whether a layer has one or two outputs per head of linear attention, for its strengths and decays."""
    return name.endswith(NARROW)


def refuse_rank(rank: int, name: str, layer: Adaptable) -> None:
    """Raises UserError for a rank larger than the layer's matrix; narrow ones have the rank of the others, as in
    `peft`."""
    outputs, inputs = layer.shape
    most = inputs if is_narrow(name) else min(outputs, inputs)
    if not 1 <= rank <= most:
        raise UserError(
            f"lora.rank is {rank}, but {name} is {outputs} x {inputs}; give 1 to {most}, or leave the layer out of "
            "lora.targets"
        )
