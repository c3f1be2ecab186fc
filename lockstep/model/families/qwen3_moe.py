"""Qwen3 with a mixture of experts in place of the feed-forward (arXiv 2505.09388)."""

from __future__ import annotations

from typing import Any

from lockstep.model.config import ExpertsConfig, ModelConfig
from lockstep.model.families.reading import layer_numbers, truth, whole_number
from lockstep.model.families.windows import same_window, write_same_window
from lockstep.ops.routing import Routing

ARCHITECTURE = "Qwen3MoeForCausalLM"
MODEL_TYPE = "qwen3_moe"
CONSTANTS = dict(vocab_size=151936, qk_norm="head", tie_embeddings=False)
DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
}
"""Defaults of missing keys in a `config.json`: those of transformers' class. `head_dim` follows from `hidden_size`."""
ALIASES = {"num_local_experts": "num_experts"}
ONLY = {"use_qk_norm": True, "shared_expert_intermediate_size": 0}
WITHOUT_EFFECT = {"max_window_layers", "router_aux_loss_coef"}


def read_attention(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Fields of ModelConfig from the keys of `config.json`: a window is that of all layers. Raises UserError."""
    return same_window(values if values["use_sliding_window"] else values | {"sliding_window": None}, where)


def write_attention(config: ModelConfig) -> dict[str, Any]:
    """The keys of `config.json`."""
    return write_same_window(config) | {"use_sliding_window": bool(config.windows)}


def read_experts(values: dict[str, Any], where: str) -> ExpertsConfig:
    """From the keys of `config.json`. Raises UserError."""
    layers = whole_number(values, "num_hidden_layers", where)
    step = whole_number(values, "decoder_sparse_step", where, least=1)
    dense = {*layer_numbers(values, "mlp_only_layers", where, layers), *(n for n in range(layers) if (n + 1) % step)}
    active = whole_number(values, "num_experts_per_tok", where)
    normalized = truth(values, "norm_topk_prob", where)
    return ExpertsConfig(
        whole_number(values, "num_experts", where, least=1),
        whole_number(values, "moe_intermediate_size", where),
        Routing(active, "softmax_of_chosen" if normalized else "softmax"),
        dense_layers=tuple(sorted(dense)),
    )


def write_experts(config: ModelConfig) -> dict[str, Any]:
    """The keys of `config.json`, for old and new transformers."""
    assert config.experts is not None
    return {
        "num_experts": config.experts.count,
        "num_local_experts": config.experts.count,
        "num_experts_per_tok": config.experts.routing.active,
        "moe_intermediate_size": config.experts.intermediate_size,
        "norm_topk_prob": config.experts.routing.scoring == "softmax_of_chosen",
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(config.experts.dense_layers),
    }


def _experts(count: int, active: int, size: int) -> dict[str, Any]:
    """The dense size, which no layer uses, is that of all active experts."""
    experts = ExpertsConfig(count, size, Routing(active, "softmax_of_chosen"))
    return {"intermediate_size": active * size, "experts": experts}


PRESETS: dict[str, dict[str, Any]] = {
    "micro": dict(
        vocab_size=258, dim=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, **_experts(8, 2, 128),
        tie_embeddings=True,
    ),
    "tiny": dict(
        vocab_size=2048, dim=256, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=64, **_experts(16, 4, 256),
        tie_embeddings=True,
    ),
    "small": dict(
        vocab_size=32000, dim=768, num_layers=8, num_heads=12, num_kv_heads=12, head_dim=64, **_experts(32, 4, 768),
    ),
    "30b-a3b": dict(
        dim=2048, num_layers=48, num_heads=32, num_kv_heads=4, head_dim=128, **_experts(128, 8, 768),
    ),
    "235b-a22b": dict(
        dim=4096, num_layers=94, num_heads=64, num_kv_heads=4, head_dim=128, **_experts(128, 8, 1536),
    ),
}  # fmt: skip
