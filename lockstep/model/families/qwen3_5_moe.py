"""Qwen3.5 with a mixture of experts in every layer, like Qwen3-Next's."""

from __future__ import annotations

from typing import Any

from lockstep.model.config import DeltaNet, ExpertsConfig, ModelConfig
from lockstep.model.families import qwen3_5, qwen3_next
from lockstep.model.families.qwen3_5 import MICRO, ROPE_KEYS, TINY, is_ignored, read_attention, write_attention
from lockstep.model.families.qwen3_next import mixture

__all__ = ["ROPE_KEYS", "is_ignored", "read_attention", "write_attention"]

ARCHITECTURE, STEM = "Qwen3_5MoeForCausalLM", "Qwen3_5MoeText"
MODEL_TYPE = "qwen3_5_moe_text"
CONSTANTS: dict[str, Any] = qwen3_5.CONSTANTS | dict(tie_embeddings=False)
DEFAULTS = qwen3_5.DEFAULTS | {
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
"""Defaults of missing keys in a `config.json`: those of transformers' class, which has no dense layers, whose size is
that of all active experts here."""
ALWAYS = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
"""What Qwen3-Next's keys would have to say."""
ONLY = qwen3_5.ONLY | ALWAYS
WITHOUT_EFFECT = qwen3_5.WITHOUT_EFFECT | {"router_aux_loss_coef"}


def read_experts(values: dict[str, Any], where: str) -> ExpertsConfig:
    """From the keys of `config.json`. Raises UserError."""
    return qwen3_next.read_experts(values | ALWAYS, where)


def write_experts(config: ModelConfig) -> dict[str, Any]:
    """The keys of `config.json`."""
    return {key: value for key, value in qwen3_next.write_experts(config).items() if key not in ALWAYS}


PRESETS: dict[str, dict[str, Any]] = {
    "micro": MICRO | mixture(8, 2, 128) | dict(delta=DeltaNet(2, 4, 32, 32), tie_embeddings=True),
    "tiny": TINY | mixture(16, 4, 256) | dict(delta=DeltaNet(2, 4, 64, 64), tie_embeddings=True),
    "35b-a3b": dict(
        dim=2048, num_layers=40, num_heads=16, num_kv_heads=2, **mixture(256, 8, 512),
        delta=DeltaNet(16, 32, 128, 128),
    ),
    "122b-a10b": dict(
        dim=3072, num_layers=48, num_heads=32, num_kv_heads=2, **mixture(256, 8, 1024),
        delta=DeltaNet(16, 64, 128, 128),
    ),
    "397b-a17b": dict(
        dim=4096, num_layers=60, num_heads=32, num_kv_heads=2, **mixture(512, 10, 1024),
        delta=DeltaNet(16, 64, 128, 128),
    ),
}  # fmt: skip
