"""The one model: trainer and generator both call `Decoder.forward`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lockstep import ops
from lockstep.errors import UserError
from lockstep.model import layers
from lockstep.model.adapted_rows import AdaptedRows, adapted, adapted_rows, refuse_rows
from lockstep.model.config import ModelConfig
from lockstep.model.delta_net import DeltaNet
from lockstep.model.formatted import FormattedWeight, formatted_weights
from lockstep.model.latent import LatentAttention
from lockstep.model.moe import feed_forward_of
from lockstep.model.rotary import RotaryTables
from lockstep.ops import native
from lockstep.precision import HEAD, Precision

Projected = tuple[Tensor | None, ...]
"""What a layer's attention reads of each token, and last the gate of its result, if there is one. Attention reads
queries, keys and values, None if the keys are the values; the delta rule reads what `ops.delta` says."""


class Block(nn.Module):
    """One layer: everything before attention, and everything after it."""

    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype, device: str | torch.device):
        super().__init__()
        self.names, self.scale, self.chunks = config.norms, config.residual_scale, config.reduction_chunks
        self.rope = config.rope(index)
        """Index of its rotary embedding."""

        def add_norm(name: str) -> None:
            if name:
                self.add_module(name, layers.Norm(config, dtype, device))

        add_norm(config.norms.before_attention)
        if config.is_delta(index):
            self.linear_attn = DeltaNet(config, dtype, device)
        elif config.latent is None:
            self.self_attn: layers.Attention | LatentAttention = layers.Attention(config, index, dtype, device)
        else:
            self.self_attn = LatentAttention(config, dtype, device)
        add_norm(config.norms.after_attention)
        add_norm(config.norms.before_mlp)
        self.mlp = feed_forward_of(config, index, dtype, device)
        add_norm(config.norms.after_mlp)

    @property
    def is_delta(self) -> bool:
        """Whether the layer has linear attention."""
        return "linear_attn" in self._modules

    @property
    def mixer(self) -> layers.Attention | LatentAttention | DeltaNet:
        """The part that mixes tokens: attention, or linear attention."""
        return self.linear_attn if self.is_delta else self.self_attn

    @property
    def output(self) -> layers.Projection:
        """The projection of what the mixer computes to the residual stream."""
        return self.linear_attn.out_proj if self.is_delta else self.self_attn.o_proj

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Callable[..., Tensor],
        halves: Halves,
        row_counts: Tensor | None = None,
        adapters: tuple[AdaptedRows, ...] = (),
    ) -> Tensor:
        """`attend` takes what the first half projects, but its gate, and the mixer's other parameters; `halves` calls
        the two methods below, or their compiled versions. `row_counts` are for the load of a mixture's experts."""
        # Here instead of around all layers: a checkpointed layer's backward calls this again, in any thread.
        with adapted(adapters), ops.counted_rows(row_counts):
            *read, gate = halves.before_attention(self, hidden, cos, sin)
            attended = attend(*read, self.mixer.terms())
            return halves.after_attention(self, hidden, attended, gate)

    def before_attention(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Projected:
        return self.mixer.project(self._read(hidden, self.names.before_attention), cos, sin)

    def after_attention(self, hidden: Tensor, attended: Tensor, gate: Tensor | None) -> Tensor:
        attended = self.output.project(self.mixer.values(attended, gate), self.chunks)
        hidden = self._added(hidden, attended, self.names.after_attention)
        return self._added(hidden, self.mlp(self._read(hidden, self.names.before_mlp)), self.names.after_mlp)

    def _read(self, hidden: Tensor, norm: str) -> Tensor:
        """What a half of the layer reads from the residual stream."""
        read: Tensor = getattr(self, norm)(hidden) if norm else ops.every_row(hidden, self.output.weight)
        return read

    def _added(self, hidden: Tensor, branch: Tensor, norm: str) -> Tensor:
        """The residual stream after a half of the layer."""
        if norm:
            branch = getattr(self, norm).of_branch(branch)
        return hidden + (branch if self.scale == 1 else branch * self.scale)


@runtime_checkable
class Halves(Protocol):
    """Calls a block's two halves: `Block` itself calls them directly, `CompiledHalves` their compiled versions."""

    def before_attention(self, block: Block, hidden: Tensor, cos: Tensor, sin: Tensor) -> Projected: ...

    def after_attention(self, block: Block, hidden: Tensor, attended: Tensor, gate: Tensor | None) -> Tensor: ...


class Decoder(nn.Module):
    """A decoder over a packed row of tokens, without a batch dimension."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str | torch.device = "cpu"):
        super().__init__()
        self.config = config
        self.embed_tokens = layers.Weight(config.vocab_size, config.dim, dtype=dtype, device=device)
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        if config.embedding_norm:
            self.embed_norm = layers.Norm(config, dtype, device)
        self.layers = nn.ModuleList(Block(config, i, dtype, device) for i in range(config.num_layers))
        self.norm = layers.Norm(config, dtype, device)
        if config.score_head:
            self.score = layers.Weight(1, config.dim, dtype=dtype, device=device)
        else:
            self.lm_head = layers.Head(config, dtype, device)
        self.rotary = RotaryTables(config)
        if config.lora is not None:
            layers.add_adapter(self, config.lora, dtype, device)
        for name, layer in layers.adaptable(self):
            layer.name = name
        self.head_format = ops.NONE
        self.set_precision(config.precision)
        self.halves: Halves = Block
        """Part of the model, since it affects the bits: trainer and generator share it by construction."""
        self.runs_on: torch.device | None = None
        """The device of the forward if the weights are elsewhere: offloaded to CPU memory."""

    def forward(
        self, tokens: Int[Tensor, "tokens"], positions: Int[Tensor, "tokens"], attention: ops.Attention
    ) -> Float[Tensor, "tokens dim"]:
        """The normed hidden state of every token.

        `attention` maps rows to sequences: whole packed sequences in the trainer, this step's tokens and a paged cache
        in the generator.
        """
        return self.final_norm(self.run_blocks(self.embed(tokens), positions, attention))

    def embed(self, tokens: Int[Tensor, "tokens"]) -> Float[Tensor, "tokens dim"]:
        """The residual stream's first value."""
        format = self.head_format if self.config.tie_embeddings else ops.NONE
        rows = ops.embedding(tokens, self.embed_tokens.weight, format)
        rows = rows if self.embedding_scale == 1 else rows * self.embedding_scale
        return self.embed_norm.of_branch(rows) if self.config.embedding_norm else rows

    def run_blocks(
        self, hidden: Float[Tensor, "tokens dim"], positions: Int[Tensor, "tokens"], attention: ops.Attention
    ) -> Float[Tensor, "tokens dim"]:
        """The residual stream after this module's blocks."""
        tables = self.rotary(positions)
        counts, adapters = getattr(attention, "row_counts", None), adapted_rows()
        if adapters and self.halves is not Block:
            raise UserError(
                "adapters of some rows do not work with compiled layers, which cannot tell the rows apart; leave out "
                "compile.backend"
            )
        refuse_rows((each.rows for each in adapters), hidden.shape[0])
        places = [0, 0]  # among the layers of its kind: a cache has no room for the other's
        for block in cast(Iterable[Block], self.layers):
            cos, sin = tables[block.rope]
            attend = partial(attention.delta if block.is_delta else attention, places[block.is_delta])
            places[block.is_delta] += 1
            hidden = block(hidden, cos, sin, attend, self.halves, counts, adapters)
        return hidden

    def formatted_weights(self) -> dict[str, FormattedWeight]:
        """The weights whose products have a number format, by the names that patterns of `precision.keep` match."""
        found = dict(formatted_weights(self))
        if not self.config.score_head:
            head = self.embed_tokens if self.config.tie_embeddings else self.lm_head
            found[HEAD] = FormattedWeight(head, "weight", self, "head_format")
        return found

    def set_precision(self, precision: Precision) -> None:
        """Sets what the linear layers and the head compute in, and the format of the cache. Raises UserError for one
        that a layer cannot have."""
        if precision.cache != ops.NONE and self.config.latent is not None:
            raise UserError(
                f"precision.cache {precision.cache} has no form for latent attention, whose keys are also the values; "
                "use precision.cache none"
            )
        found = self.formatted_weights()
        table = precision.table({name: each.weight.shape[-1] for name, each in found.items()}, self.config.num_layers)
        for name, each in found.items():
            each.set_format(table[name])
        for module in self.modules():
            if isinstance(module, layers.Attention):
                module.cache = precision.cache
        self.config = replace(self.config, precision=precision)

    def pack_frozen(self) -> None:
        """Replaces the frozen weights of layers that compute in integers by these, in less memory: other weights cannot
        be loaded any more. On GPUs, and without compiled operators, nothing changes."""
        for each in self.formatted_weights().values():
            layout, weight = ops.FORMATS[each.format].layout, each.weight
            frozen = type(weight) is nn.Parameter and not weight.requires_grad
            if layout is not None and frozen and native.usable(weight):
                each.replace_weight(ops.PackedWeight.of(weight, layout))

    def reserve_positions(self, length: int) -> None:
        """Computes the rotary tables for sequences of `length` tokens in advance, so that no forward waits for them."""
        if not native.is_pretending() and self.device.type != "meta":
            self.rotary.reserve(length, self.device)

    def final_norm(self, hidden: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens dim"]:
        """The head's input."""
        normed: Tensor = self.norm(hidden)
        return normed if self.config.logits_scale == 1 else normed * self.config.logits_scale

    def logits(
        self, hidden: Float[Tensor, "rows dim"], rows: Int[Tensor, "rows"] | None = None
    ) -> Float[Tensor, "rows vocab"]:
        """In the model's dtype; log-probabilities are computed from them in float32 (`ops.logits_log_probs`).

        rows: which rows of the forward pass these are, whose adapters they have; None: all of them.
        """
        terms = self.head_terms if rows is None else self.head_terms.of(rows)
        refuse_rows((each.rows for each in terms.updates), hidden.shape[0])
        logits = layers.product(hidden, self.head_weight, terms.format)
        for update in terms.updates:
            logits = ops.add_low_rank(logits, hidden, *update)
        return ops.softcap(logits, terms.softcap) if terms.softcap else logits

    @property
    def head_weight(self) -> Float[Tensor, "outputs dim"]:
        """The output projection: the embedding's weight if tied, a reward model's score head, else `lm_head`."""
        if self.config.score_head:
            return self.score.weight
        own = self.lm_head.weight
        return self.embed_tokens.weight if own is None else own

    @property
    def head_terms(self) -> ops.HeadTerms:
        """How the logits of all rows of the forward pass are computed."""
        updates = () if self.config.score_head else self.lm_head.updates()
        return ops.HeadTerms(self.head_format, self.config.logits_softcap, updates)

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.runs_on or self.norm.weight.device
