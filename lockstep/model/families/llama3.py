"""Llama 3.x: grouped heads, rotary frequencies stretched for long contexts (arXiv 2407.21783)."""

from __future__ import annotations

from lockstep.model.ropes import RopeScaling

ARCHITECTURE = "LlamaForCausalLM"
MODEL_TYPE = "llama"
CONSTANTS = dict(
    vocab_size=128256, tie_embeddings=False, norm_eps=1e-5, rope_theta=500_000.0,
    rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192), max_positions=131072,
)  # fmt: skip
DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_bias": False,
    "mlp_bias": False,
}
"""Defaults of missing keys in a `config.json`: those of transformers' class. There are as many key-value heads as
heads, and `head_dim` follows from `hidden_size`."""


PRESETS = {
    "micro": dict(
        vocab_size=258, dim=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=384,
    ),
    "tiny": dict(
        vocab_size=2048, dim=256, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=64, intermediate_size=1024,
    ),
    "1b": dict(
        dim=2048, num_layers=16, num_heads=32, num_kv_heads=8, head_dim=64, intermediate_size=8192,
        tie_embeddings=True, rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192),
    ),
    "3b": dict(
        dim=3072, num_layers=28, num_heads=24, num_kv_heads=8, head_dim=128, intermediate_size=8192,
        tie_embeddings=True, rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192),
    ),
    "8b": dict(dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, intermediate_size=14336),
    "70b": dict(dim=8192, num_layers=80, num_heads=64, num_kv_heads=8, head_dim=128, intermediate_size=28672),
    "405b": dict(dim=16384, num_layers=126, num_heads=128, num_kv_heads=8, head_dim=128, intermediate_size=53248),
}  # fmt: skip
"""1b and 3b are Llama 3.2, larger ones Llama 3.1."""
