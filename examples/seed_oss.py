"""An architecture that Lockstep does not have, read through a family's file: Seed-OSS, whose queries, keys and values
have biases.

lockstep generate --model seed_oss.py:ByteDance-Seed/Seed-OSS-36B-Instruct --prompt "The capital of France is"
"""

from __future__ import annotations

from typing import Any

from lockstep.model.config import ModelConfig
from lockstep.model.families.reading import truth

ARCHITECTURE = "SeedOssForCausalLM"
MODEL_TYPE = "seed_oss"
CONSTANTS: dict[str, Any] = dict(qkv_bias=True, tie_embeddings=False)
DEFAULTS = {
    "vocab_size": 155136,
    "hidden_size": 4096,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524288,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "attention_bias": True,
    "attention_out_bias": False,
    "attention_dropout": 0.1,
    "residual_dropout": 0.1,
}
"""Defaults of missing keys: those of transformers' class. Lockstep trains without dropout."""


def read_attention(values: dict[str, Any], where: str) -> dict[str, Any]:
    """`attention_bias` is for queries, keys and values only."""
    return {
        "qkv_bias": truth(values, "attention_bias", where),
        "output_bias": truth(values, "attention_out_bias", where),
    }


def write_attention(config: ModelConfig) -> dict[str, Any]:
    """The inverse."""
    return {"attention_bias": config.qkv_bias, "attention_out_bias": config.output_bias}
