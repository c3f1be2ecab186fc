"""nanochat: norms without weights, of queries and keys too, a feed-forward without a gate, capped logits
(github.com/karpathy/nanochat)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lockstep.errors import UserError
from lockstep.model.config import ModelConfig
from lockstep.model.families import rope
from lockstep.model.ropes import LinearRope

ARCHITECTURE = "NanoChatForCausalLM"
MODEL_TYPE = "nanochat"
# Its rotation turns the other way: a negative divisor of the frequencies. That it comes before the norms of queries and
# keys makes no difference to norms without weights.
CONSTANTS: dict[str, Any] = dict(
    vocab_size=65536, tie_embeddings=False, rope_theta=10_000.0, max_positions=2048, plain_norms=True,
    qk_norm="head", activation="relu_squared", embedding_norm=True, rope_scaling=LinearRope(-1.0),
    logits_softcap=15.0,
)  # fmt: skip
DEFAULTS = {
    "vocab_size": 50304,
    "hidden_size": 768,
    "intermediate_size": 8192,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "attention_bias": False,
    "final_logit_softcapping": 15.0,
}
"""Defaults of missing keys in a `config.json`: those of transformers' class. There are as many key-value heads as
heads, and `head_dim` follows from `hidden_size`."""
ONLY = {"hidden_act": "relu2"}
"""Settings that would change the arithmetic, and their only supported value."""


def read_attention(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Fields of ModelConfig from the keys of `config.json`. Raises UserError."""
    table = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if isinstance(table, dict) and table.get("rope_type", table.get("type", "default")) != "default":
        raise UserError(f"{where}: rope_scaling and rope_parameters: only rope_type default is supported for nanochat")
    return {"embedding_norm": True, "rope_scaling": CONSTANTS["rope_scaling"]}


def write_attention(config: ModelConfig) -> dict[str, Any]:
    """The keys of `config.json`."""
    return {"hidden_act": "relu2"}


def write_rope(config: ModelConfig, keys: rope.RopeKeys) -> dict[str, Any]:
    """The keys of `config.json` for the rotary embedding, whose direction is not among them."""
    return rope.write_rope(replace(config, rope_scaling=None), keys)


def _depth(layers: int) -> dict[str, Any]:
    """The width follows from the depth, as in the project's scripts."""
    dim = 64 * layers
    heads = dim // 128
    return dict(
        dim=dim, num_layers=layers, num_heads=heads, num_kv_heads=heads, head_dim=128, intermediate_size=4 * dim
    )  # fmt: skip


PRESETS: dict[str, dict[str, Any]] = {
    "micro": dict(
        vocab_size=258, dim=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=384,
    ),
    "d20": _depth(20),
    "d32": _depth(32),
}  # fmt: skip
