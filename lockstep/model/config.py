"""What a decoder is made of."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.errors import UserError


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.x's stretching of the slow rotary frequencies to longer contexts."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a dense decoder of the Llama 3 or Qwen3 family. Raises UserError where it cannot be built."""

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
    rope_scaling: RopeScaling | None = None
    max_positions: int = 32768
    tie_embeddings: bool = True
    qk_norm: bool = False
    """Normalise each head's queries and keys (Qwen3)."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    reduction_chunks: int = 1
    """Parts that attention's output and the feed-forward's second product are summed in, and then in a tree: a power of
    two, at least as many as the ranks that share them. Another number gives other bits."""

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
        if self.head_dim % 2:
            raise UserError(f"model: head_dim is {self.head_dim}; rotary embedding needs an even one")

        chunks = self.reduction_chunks
        # In bfloat16 a product reads two features at once.
        cut = {"features of the heads": self.num_heads * self.head_dim, "intermediate_size": self.intermediate_size}
        wrong = [f"{name} ({size})" for name, size in cut.items() if chunks > 1 and size % (2 * chunks)]
        if chunks < 1 or chunks & (chunks - 1) or wrong:
            raise UserError(
                f"model: reduction_chunks is {chunks}; it must be a power of two"
                + (f", twice of which divides {' and '.join(wrong)}" if wrong else "")
            )

    @property
    def num_parameters(self) -> int:
        """Weights in all; a tied head counts once."""
        attention = self.dim * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        norms = 2 * self.dim + (2 * self.head_dim if self.qk_norm else 0)
        layer = attention + 3 * self.dim * self.intermediate_size + norms
        embeddings = self.vocab_size * self.dim * (1 if self.tie_embeddings else 2)
        return embeddings + self.num_layers * layer + self.dim
