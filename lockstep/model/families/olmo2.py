"""OLMo 2: norms after attention and feed-forward, and of all heads' queries and keys together (arXiv 2501.00656)."""

from __future__ import annotations

from lockstep.model.config import Norms

ARCHITECTURE = "Olmo2ForCausalLM"
MODEL_TYPE = "olmo2"
CONSTANTS = dict(
    vocab_size=100352, tie_embeddings=False, rope_theta=500_000.0, max_positions=4096, qk_norm="all heads",
    norms=Norms("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
)  # fmt: skip
DEFAULTS = {
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "eos_token_id": 50279,
    "pad_token_id": 1,
    "attention_bias": False,
}
"""Defaults of missing keys in a `config.json`: those of transformers' class. There are as many key-value heads as
heads, and `head_dim` follows from `hidden_size`."""

PRESETS = {
    "micro": dict(
        vocab_size=258, dim=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=384,
    ),
    "1b": dict(dim=2048, num_layers=16, num_heads=16, num_kv_heads=16, head_dim=128, intermediate_size=8192),
    "7b": dict(dim=4096, num_layers=32, num_heads=32, num_kv_heads=32, head_dim=128, intermediate_size=11008),
    "13b": dict(dim=5120, num_layers=40, num_heads=40, num_kv_heads=40, head_dim=128, intermediate_size=13824),
    "32b": dict(dim=5120, num_layers=64, num_heads=40, num_kv_heads=8, head_dim=128, intermediate_size=27648),
}  # fmt: skip
