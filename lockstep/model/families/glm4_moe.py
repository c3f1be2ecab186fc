"""GLM-4.5 and later: a mixture of experts like DeepSeek-V3's, half of each head rotated (arXiv 2508.06471)."""

from __future__ import annotations

from typing import Any

from lockstep.model.config import ExpertsConfig, ModelConfig
from lockstep.model.families import deepseek_v3
from lockstep.model.families.deepseek_v3 import ONLY, is_ignored, read_experts
from lockstep.model.families.reading import truth
from lockstep.model.families.rope import RopeKeys
from lockstep.ops.routing import Routing

__all__ = ["ONLY", "is_ignored", "read_experts"]

ARCHITECTURE = "Glm4MoeForCausalLM"
MODEL_TYPE = "glm4_moe"
CONSTANTS: dict[str, Any] = dict(
    vocab_size=151552, tie_embeddings=False, norm_eps=1e-5, max_positions=131072, qkv_bias=True, rotated_features=64
)  # fmt: skip
DEFAULTS = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.5,
    "attention_bias": False,
    "use_qk_norm": False,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
}
"""Defaults of missing keys in a `config.json`: those of transformers' class. `head_dim` follows from `hidden_size`."""
ALIASES = {"num_local_experts": "n_routed_experts"}
WITHOUT_EFFECT = {"num_nextn_predict_layers", "num_mtp_layers"}
"""Keys for multi-token prediction layers."""
ROPE_KEYS = RopeKeys(partial=True)


def read_attention(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Fields of ModelConfig from the keys of `config.json`. Raises UserError."""
    return {
        "qkv_bias": truth(values, "attention_bias", where),
        "output_bias": False,
        "qk_norm": "head" if truth(values, "use_qk_norm", where) else "none",
    }


def write_attention(config: ModelConfig) -> dict[str, Any]:
    """The keys of `config.json`."""
    return {"use_qk_norm": config.qk_norm == "head", "num_nextn_predict_layers": 0}


def write_experts(config: ModelConfig) -> dict[str, Any]:
    """The keys of `config.json`."""
    return {key: value for key, value in deepseek_v3.write_experts(config).items() if key not in ONLY}


def _experts(count: int, active: int, size: int, dense_layers: int, scale: float) -> ExpertsConfig:
    routing = Routing(active, "sigmoid", scale=scale)
    return ExpertsConfig(count, size, routing, size, choice_bias=True, dense_layers=tuple(range(dense_layers)))


PRESETS: dict[str, dict[str, Any]] = {
    "micro": dict(
        vocab_size=258, dim=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=384,
        rotated_features=16, qk_norm="head", experts=_experts(8, 2, 128, 1, 1.0),
    ),
    "106b-a12b": dict(
        dim=4096, num_layers=46, num_heads=96, num_kv_heads=8, head_dim=128, intermediate_size=10944,
        experts=_experts(128, 8, 1408, 1, 1.0),
    ),
    "355b-a32b": dict(
        dim=5120, num_layers=92, num_heads=96, num_kv_heads=8, head_dim=128, intermediate_size=12288,
        qk_norm="head", experts=_experts(160, 8, 1536, 3, 2.5),
    ),
}  # fmt: skip
