"""Granite: Llama's blocks with factors on the embeddings, the scores, the residual stream and the logits
(arXiv 2405.04324)."""

from __future__ import annotations

import warnings
from typing import Any

from lockstep.model.config import ModelConfig
from lockstep.model.families import llama3
from lockstep.model.families.reading import number

ARCHITECTURE = "GraniteForCausalLM"
MODEL_TYPE = "granite"
CONSTANTS = dict(vocab_size=49159, norm_eps=1e-5, rope_theta=10_000_000.0, max_positions=131072)
DEFAULTS = llama3.DEFAULTS | {
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "attention_dropout": 0.0,
}
"""Defaults of missing keys in a `config.json`: those of transformers' class. There are as many key-value heads as
heads, and `head_dim` follows from `hidden_size`."""
MULTIPLIERS = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention_scale",
}


def read_attention(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Fields of ModelConfig from the keys of `config.json`. Raises UserError."""
    if values["attention_dropout"]:  # as published sizes have it
        warnings.warn(
            f"{where}: attention_dropout is {values['attention_dropout']!r:.40}; Lockstep trains without dropout",
            stacklevel=2,
        )
    factors = {field: float(number(values[key], f"{where}: {key}")) for key, field in MULTIPLIERS.items()}
    return factors | {"logits_scale": 1 / float(number(values["logits_scaling"], f"{where}: logits_scaling"))}


def write_attention(config: ModelConfig) -> dict[str, Any]:
    """The keys of `config.json`."""
    factors = {key: getattr(config, field) for key, field in MULTIPLIERS.items()}
    return factors | {"logits_scaling": 1 / config.logits_scale}


def _factors(logits: float, attention: float, embedding: float = 12.0, residual: float = 0.22) -> dict[str, float]:
    return dict(
        logits_scale=1 / logits, attention_scale=attention, embedding_scale=embedding, residual_scale=residual
    )  # fmt: skip


PRESETS: dict[str, dict[str, Any]] = {
    "micro": dict(
        vocab_size=258, dim=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=384,
        **_factors(8.0, 1 / 32),
    ),
    "2b": dict(
        dim=2048, num_layers=40, num_heads=32, num_kv_heads=8, head_dim=64, intermediate_size=8192,
        **_factors(8.0, 1 / 64),
    ),
    "8b": dict(
        dim=4096, num_layers=40, num_heads=32, num_kv_heads=8, head_dim=128, intermediate_size=12800,
        **_factors(16.0, 1 / 128),
    ),
}  # fmt: skip
"""2b and 8b are Granite 3.3."""
