"""The shape of a decoder."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from lockstep.errors import UserError
from lockstep.model.ropes import LongQueries, Rope, RopeScale
from lockstep.ops.routing import Routing
from lockstep.precision import MODELS_DTYPE, Precision


class Norms(NamedTuple):
    """The names of a block's norms: of what attention and the feed-forward read, and of what they add to the residual
    stream; empty: none."""

    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""


QKNorm = Literal["none", "head", "all heads"]
Activation = Literal["silu", "gelu_tanh", "relu_squared"]
QK_NORMS, ACTIVATIONS, FUSED = get_args(QKNorm), get_args(Activation), {"qkv_proj", "gate_up_proj"}
BEFORE = Norms()
"""Norms before attention and feed-forward, with the names that Llama's folders have for them."""


@dataclass(frozen=True)
class Latent:
    """Sizes of latent attention, whose cache holds one compressed key per token (arXiv 2405.04434, section 2.1)."""

    kv_rank: int
    """Features of the latent, from which each head's keys and values are computed."""
    nope_dim: int
    """Features of a head's queries and keys that are not rotated."""
    rope_dim: int
    """Features that are rotated: of each head's queries, and of one key for all heads."""
    value_dim: int
    q_rank: int = 0
    """Features of compressed queries; 0: queries are not compressed."""
    interleaved: bool = True
    """Whether neighboring features are rotated together, instead of features half the width apart."""

    @property
    def key_dim(self) -> int:
        """Width of the key in the cache: the latent, and the rotated features."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True)
class DeltaNet:
    """Sizes of the gated delta networks that replace attention in some layers (arXiv 2412.06464)."""

    key_heads: int
    """Heads of queries and keys."""
    value_heads: int
    """A multiple of `key_heads`."""
    key_dim: int
    """Features of a head's queries and keys."""
    value_dim: int
    """Features of a head's values."""
    width: int = 4
    """Tokens that the convolution before the recurrence reads."""
    fused: bool = False
    """Whether the projections are two weights, with the rows of a key head together (Qwen3-Next), instead of four."""

    def __post_init__(self) -> None:
        for name in ("key_heads", "value_heads", "key_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise UserError(f"model: {name} of linear attention is {getattr(self, name)}; it must be at least 1")
        if self.value_heads % self.key_heads:
            raise UserError(
                f"model: linear attention has {self.value_heads} value heads, which is not a multiple of its "
                f"{self.key_heads} key heads"
            )
        if self.width < 2:
            raise UserError(f"model: the convolution of linear attention reads {self.width} tokens; at least 2")

    @property
    def queries(self) -> int:
        """Features of all heads' queries, and of their keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Features of all heads' values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.queries + self.values


@dataclass(frozen=True)
class Lora:
    """A low-rank adapter: to the products with the weights of `modules` it adds `scaling · B A x` (arXiv 2106.09685).

    The model's weights are frozen; A `[rank, in]` and B `[out, rank]` are trained.
    """

    rank: int
    alpha: float
    modules: tuple[str, ...]
    """Names of the adapted layers, such as `layers.3.mlp.up_proj`."""

    @property
    def scaling(self) -> float:
        """Scaling of the update."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class ExpertsConfig:
    """The feed-forward of a layer as a mixture of experts. Raises UserError if it cannot be built."""

    count: int
    intermediate_size: int
    """Intermediate size of each expert."""
    routing: Routing
    shared_size: int = 0
    """Intermediate size of the shared feed-forward of all tokens; 0: none."""
    choice_bias: bool = False
    """Whether a bias per expert, without gradient, is added to the scores, only for the choice of experts."""
    clamped: bool = False
    """Whether the experts are gpt-oss's: gate and up are interleaved in one product's outputs, the activation is
    clamped, and the router's and all experts' products have biases."""
    shared_gate: bool = False
    """Whether the shared feed-forward is multiplied by the sigmoid of a logit per token (Qwen3-Next)."""
    dense_layers: tuple[int, ...] = ()
    """Layers with a dense feed-forward, of size `ModelConfig.intermediate_size`."""

    def __post_init__(self) -> None:
        sizes = {"the number of experts": self.count, "the experts' intermediate size": self.intermediate_size}
        for name, size in sizes.items():
            if size < 1:
                raise UserError(f"model: {name} is {size}; it must be at least 1")
        active, groups, chosen = self.routing.active, self.routing.groups, self.routing.groups_kept
        if not 1 <= active <= self.count:
            raise UserError(f"model: {active} experts per token of {self.count} in total; give 1 to {self.count}")
        if groups < 1 or self.count % groups or not 1 <= chosen <= groups:
            raise UserError(
                f"model: {self.count} experts in {groups} groups, of which {chosen} are chosen; the groups must be "
                "equal, and at least 1 and at most all of them chosen"
            )
        if active > (left := self.count // groups * chosen):
            raise UserError(f"model: {active} experts per token, but the {chosen} chosen groups have {left}")
        if not self.routing.scale > 0:
            raise UserError(f"model: the experts' scale is {self.routing.scale}; it must be above 0")
        if self.shared_gate and not self.shared_size:
            raise UserError("model: shared_gate needs a shared expert; set shared_size, or leave it off")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder of one of the families. Raises UserError if it cannot be built."""

    family: str
    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    rope_scaling: RopeScale | None = None
    window_rope: Rope | None = None
    """The rotary embedding of layers with a window, if theirs is another (Gemma 3)."""
    rotated_features: int = 0
    """The first features of each head's queries and keys that are rotated; 0: all."""
    rope_interleaved: bool = False
    """Whether neighboring features are rotated together, instead of features half the width apart."""
    rotated: tuple[bool, ...] = ()
    """Whether successive layers rotate queries and keys. The list repeats over the layers; empty: all do."""
    long_queries: LongQueries | None = None
    max_positions: int = 32768
    tie_embeddings: bool = True
    score_head: bool = False
    """A reward model: instead of logits, the head outputs one number, the score of the text up to the token."""
    norms: Norms = BEFORE
    norm_offset: bool = False
    """Whether a norm's factor is 1 + its weight (Gemma)."""
    plain_norms: bool = False
    """Whether norms have no weights (nanochat)."""
    qk_norm: QKNorm = "none"
    """Normalize queries and keys: of each head (Qwen3), or of all heads together (OLMo 2)."""
    qkv_bias: bool = False
    """Biases in the projections to queries, keys and values."""
    output_bias: bool = False
    """A bias in the projection of the attended values."""
    mlp_bias: bool = False
    """Biases in the dense feed-forward."""
    activation: Activation = "silu"
    """Of the feed-forward, which has a gate unless it is relu_squared."""
    embedding_scale: float = 1.0
    """Factor of the embeddings."""
    embedding_norm: bool = False
    """Normalize the embeddings (nanochat)."""
    residual_scale: float = 1.0
    """Factor of what attention and the feed-forward add to the residual stream."""
    attention_scale: float | None = None
    """Factor of the scores; None: 1 / √head_dim."""
    logits_scale: float = 1.0
    """Factor of the logits, applied to the head's input."""
    logits_softcap: float = 0.0
    """The logits are capped smoothly to ± this value; 0: they are not."""
    sinks: bool = False
    """A learned score per head that enters only the softmax's denominator (gpt-oss)."""
    windows: tuple[int, ...] = ()
    """Number of keys that a query sees in successive layers, including the one at its position; 0: all. The list
    repeats over the layers; empty: all layers see all keys."""
    attention_gate: bool = False
    """Whether each head's attended values are multiplied by the sigmoid of a gate, which is projected with its query
    (Qwen3-Next)."""
    delta: DeltaNet | None = None
    """Sizes of the layers with linear attention, if any."""
    delta_layers: tuple[bool, ...] = ()
    """Whether successive layers have linear attention. The list repeats over the layers; empty: none has."""
    latent: Latent | None = None
    """Sizes of latent attention (DeepSeek-V3), which has one key-value head, with a key of `head_dim`."""
    fused: tuple[str, ...] = ()
    """The projections that are one weight: `qkv_proj`, of queries, keys and values, and `gate_up_proj`."""
    experts: ExpertsConfig | None = None
    """The mixture of experts that replaces the feed-forward, if any."""
    lora: Lora | None = None
    """The adapter that is trained instead of the weights, if any. Not counted in `num_parameters`."""
    precision: Precision = MODELS_DTYPE
    """What the linear layers compute in. Another one gives different bits."""
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    """Only saved for transformers, whose reward models locate the ends of a batch's texts with it."""
    eos_token_ids: tuple[int, ...] = ()
    reduction_chunks: int = 1
    """Parts in which the output projection and the feed-forward's down projection are summed, before these are joined
    in a tree: a power of two, at least the number of ranks that share them. Another number gives different bits."""

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")
        for name in sizes:
            if getattr(self, name) < 1:
                raise UserError(f"model: {name} is {getattr(self, name)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"model: {self.num_heads} heads do not divide into {self.num_kv_heads} key-value heads; "
                "choose a divisor of num_attention_heads"
            )
        for name, known in (("qk_norm", QK_NORMS), ("activation", ACTIVATIONS)):
            if getattr(self, name) not in known:
                raise UserError(f"model: {name} is {getattr(self, name)!r}; it must be one of {', '.join(known)}")
        if unknown := set(self.fused) - FUSED:
            raise UserError(f"model: fused has {', '.join(sorted(unknown))}; it can have {', '.join(sorted(FUSED))}")
        if not 0 <= self.rotated_features <= self.head_dim:
            raise UserError(
                f"model: rotated_features is {self.rotated_features}; it must be 0 for all, or up to head_dim, "
                f"{self.head_dim}"
            )
        if not 0 <= self.logits_softcap < math.inf:
            raise UserError(f"model: logits_softcap is {self.logits_softcap}; it must be above 0, or 0 for no cap")
        if self.score_head and self.tie_embeddings:
            raise UserError("model: a score head has its own weight; set tie_embeddings to False")
        if self.rotary_dim % 2:
            name = "rope_dim" if self.latent else "rotated_features" if self.rotated_features else "head_dim"
            raise UserError(f"model: {name} is {self.rotary_dim}; rotary embedding needs an even one")
        self._check_latent()
        if any(self.delta_layers) and self.delta is None:
            raise UserError("model: delta_layers need the sizes of linear attention; set delta")
        if min(self.windows, default=0) < 0:
            raise UserError(f"model: windows are {list(self.windows)}; each must be a number of tokens, or 0 for all")
        chunks = self.reduction_chunks
        # In bfloat16, products read two features at a time.
        cut = self.mixed_features | self.dense_sizes
        wrong = [f"{name} ({size})" for name, size in cut.items() if chunks > 1 and size % (2 * chunks)]
        if chunks < 1 or chunks & (chunks - 1) or wrong:
            raise UserError(
                f"model: reduction_chunks is {chunks}; it must be a power of two"
                + (f", twice of which divides {' and '.join(wrong)}" if wrong else "")
            )

    def _check_latent(self) -> None:
        if self.latent is None:
            return
        for name in ("kv_rank", "nope_dim", "rope_dim", "value_dim"):
            if getattr(self.latent, name) < 1:
                raise UserError(f"model: {name} is {getattr(self.latent, name)}; it must be at least 1")
        if self.latent.q_rank < 0:
            raise UserError(f"model: q_rank is {self.latent.q_rank}; it must be at least 0")
        if self.num_kv_heads != 1 or self.head_dim != self.latent.key_dim:
            raise UserError(
                f"model: latent attention has one key of kv_rank + rope_dim = {self.latent.key_dim} features for all "
                f"heads, but num_kv_heads is {self.num_kv_heads} and head_dim {self.head_dim}; set them to 1 and "
                f"{self.latent.key_dim}"
            )

    @property
    def rotary_dim(self) -> int:
        """Features of a query or key that are rotated."""
        return (self.rotated_features or self.head_dim) if self.latent is None else self.latent.rope_dim

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotary embeddings of the model's layers."""
        main = Rope(self.rope_theta, self.rope_scaling)
        return (main,) if self.window_rope is None else (main, self.window_rope)

    def rope(self, layer: int) -> int:
        """Index in `ropes` of a layer's rotary embedding."""
        return 1 if self.window_rope is not None and self.window(layer) else 0

    def is_rotated(self, layer: int) -> bool:
        """Whether the layer rotates queries and keys."""
        return self.rotated[layer % len(self.rotated)] if self.rotated else True

    @property
    def is_gated(self) -> bool:
        """Whether the dense feed-forward has a gate."""
        return self.activation != "relu_squared"

    @property
    def attended_features(self) -> int:
        """Features of all heads' values, which the projection back to the residual stream reads."""
        return self.num_heads * (self.head_dim if self.latent is None else self.latent.value_dim)

    @property
    def mixed_features(self) -> dict[str, int]:
        """Features that the projections back to the residual stream read from attention and linear attention, by
        name."""
        sizes = {"features of the heads": self.attended_features} if self.num_delta < self.num_layers else {}
        if self.num_delta and self.delta is not None:
            sizes["features of linear attention's heads"] = self.delta.values
        return sizes

    def window(self, layer: int) -> int:
        """Number of keys that a query sees in the layer; 0: all."""
        return self.windows[layer % len(self.windows)] if self.windows else 0

    def is_delta(self, layer: int) -> bool:
        """Whether the layer has linear attention."""
        return self.delta_layers[layer % len(self.delta_layers)] if self.delta_layers else False

    @property
    def num_delta(self) -> int:
        """Layers with linear attention."""
        return sum(map(self.is_delta, range(self.num_layers)))

    def is_dense(self, layer: int) -> bool:
        """Whether the layer's feed-forward is dense."""
        return self.experts is None or layer in self.experts.dense_layers

    @property
    def mixtures(self) -> list[int]:
        """The layers whose feed-forward is a mixture of experts."""
        return [layer for layer in range(self.num_layers) if not self.is_dense(layer)]

    @property
    def num_dense(self) -> int:
        """Layers with a dense feed-forward."""
        return self.num_layers - len(self.mixtures)

    @property
    def dense_sizes(self) -> dict[str, int]:
        """The intermediate sizes of the dense feed-forwards, by name."""
        sizes = {"intermediate_size": self.intermediate_size} if self.num_dense else {}
        if self.experts is not None and self.experts.shared_size:
            sizes["the shared expert's intermediate size"] = self.experts.shared_size
        return sizes

    @property
    def num_parameters(self) -> int:
        """Weights in total; a tied head counts once."""
        return self._parameters(lambda experts: experts.count)

    @property
    def num_active_parameters(self) -> int:
        """Weights that are active per token: in a mixture, only those of its chosen experts."""
        return self._parameters(lambda experts: experts.routing.active)

    def _parameters(self, met: Callable[[ExpertsConfig], int]) -> int:
        layers = self.num_layers * sum(map(bool, self.norms)) * self.dim
        layers += self.num_delta * self._delta_parameters
        layers += (self.num_layers - self.num_delta) * self._attention_parameters
        layers += self.num_dense * self._dense_parameters(self.intermediate_size)
        if self.experts is not None:
            routed = 3 * self.dim * met(self.experts) * self.experts.intermediate_size
            if self.experts.shared_size:
                routed += self._dense_parameters(self.experts.shared_size) + self.experts.shared_gate * self.dim
            router = self.experts.count * (self.dim + self.experts.choice_bias + self.experts.clamped)
            if self.experts.clamped:
                routed += met(self.experts) * (2 * self.experts.intermediate_size + self.dim)
            layers += len(self.mixtures) * (routed + router)
        head = 0 if self.tie_embeddings else self.dim * (1 if self.score_head else self.vocab_size)
        return self.vocab_size * self.dim + layers + (2 if self.embedding_norm else 1) * self.dim + head

    def _dense_parameters(self, size: int) -> int:
        """Parameters of a dense feed-forward."""
        inner = 2 if self.is_gated else 1
        return (inner + 1) * self.dim * size + (inner * size + self.dim if self.mlp_bias else 0)

    @property
    def _delta_parameters(self) -> int:
        """Parameters of a layer's linear attention, with the norm inside it."""
        if (delta := self.delta) is None:
            return 0
        weights = self.dim * (delta.channels + 2 * delta.values + 2 * delta.value_heads)
        return weights + delta.channels * delta.width + 2 * delta.value_heads + delta.value_dim

    @property
    def _attention_parameters(self) -> int:
        """Parameters of a layer's attention, with the norms inside it."""
        if (latent := self.latent) is None:
            queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
            weights = (2 + self.attention_gate) * self.dim * queries + 2 * self.dim * keys
            biases = (1 + self.attention_gate) * queries + 2 * keys
            weights += (biases if self.qkv_bias else 0) + (self.dim if self.output_bias else 0)
            normed = {"none": 0, "all heads": queries + keys}.get(self.qk_norm, 2 * self.head_dim)
            return weights + normed + (self.num_heads if self.sinks else 0)
        queries, read = self.num_heads * (latent.nope_dim + latent.rope_dim), latent.q_rank or self.dim
        compressed = latent.q_rank * (self.dim + 1) + latent.kv_rank + self.dim * latent.key_dim
        keys = self.num_heads * (latent.nope_dim + latent.value_dim) * latent.kv_rank
        return queries * read + compressed + keys + self.attended_features * self.dim
