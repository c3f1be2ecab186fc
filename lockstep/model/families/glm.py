"""GLM-4 (2024): half of each head is rotated, in pairs of neighbors; gate and up are one weight (arXiv 2406.12793)."""

from __future__ import annotations

from typing import Any

from lockstep.model.families.reading import truth
from lockstep.model.families.rope import RopeKeys

ARCHITECTURE = "GlmForCausalLM"
MODEL_TYPE = "glm"
CONSTANTS: dict[str, Any] = dict(
    vocab_size=151552, tie_embeddings=False, norm_eps=1.5625e-07, rope_theta=10_000.0, max_positions=131072,
    qkv_bias=True, rope_interleaved=True, fused=("gate_up_proj",), rotated_features=64,
)  # fmt: skip
DEFAULTS: dict[str, Any] = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.5,
    "eos_token_id": [151329, 151336, 151338],
    "pad_token_id": 151329,
    "attention_bias": True,
}
"""Defaults of missing keys in a `config.json`: those of transformers' class."""
NULL_IS_MISSING = ("eos_token_id",)
ROPE_KEYS = RopeKeys(partial=True)


def read_attention(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Fields of ModelConfig from the keys of `config.json`. Raises UserError."""
    return {"qkv_bias": truth(values, "attention_bias", where), "output_bias": False}


PRESETS: dict[str, dict[str, Any]] = {
    "micro": dict(
        vocab_size=258, dim=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=384,
        rotated_features=16,
    ),
    "9b": dict(dim=4096, num_layers=40, num_heads=32, num_kv_heads=2, head_dim=128, intermediate_size=13696),
}  # fmt: skip
