"""OLMoE: a mixture of experts, with norms of all heads' queries and keys together (arXiv 2409.02060)."""

from __future__ import annotations

from typing import Any

from lockstep.model.config import ExpertsConfig, ModelConfig
from lockstep.model.families import olmo2
from lockstep.model.families.reading import truth, whole_number
from lockstep.ops.routing import Routing

ARCHITECTURE = "OlmoeForCausalLM"
MODEL_TYPE = "olmoe"
CONSTANTS = dict(
    vocab_size=50304, tie_embeddings=False, norm_eps=1e-5, rope_theta=10_000.0, max_positions=4096, qk_norm="all heads"
)  # fmt: skip
DEFAULTS = olmo2.DEFAULTS | {
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "max_position_embeddings": 4096,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}
"""Defaults of missing keys in a `config.json`: those of transformers' class. There are as many key-value heads as
heads, and `head_dim` follows from `hidden_size`."""
ALIASES = {"num_local_experts": "num_experts"}
ONLY = {"clip_qkv": None}
WITHOUT_EFFECT = {"router_aux_loss_coef"}


def read_experts(values: dict[str, Any], where: str) -> ExpertsConfig:
    """From the keys of `config.json`. Raises UserError."""
    normalized = truth(values, "norm_topk_prob", where)
    return ExpertsConfig(
        whole_number(values, "num_experts", where, least=1),
        whole_number(values, "intermediate_size", where),
        Routing(whole_number(values, "num_experts_per_tok", where), "softmax_of_chosen" if normalized else "softmax"),
    )


def write_experts(config: ModelConfig) -> dict[str, Any]:
    """The keys of `config.json`."""
    assert config.experts is not None
    return {
        "num_experts": config.experts.count,
        "num_experts_per_tok": config.experts.routing.active,
        "intermediate_size": config.experts.intermediate_size,
        "norm_topk_prob": config.experts.routing.scoring == "softmax_of_chosen",
    }


PRESETS: dict[str, dict[str, Any]] = {
    "micro": dict(
        vocab_size=258, dim=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=128,
        experts=ExpertsConfig(8, 128, Routing(2, "softmax")),
    ),
    "7b-a1b": dict(
        dim=2048, num_layers=16, num_heads=16, num_kv_heads=16, head_dim=128, intermediate_size=1024,
        experts=ExpertsConfig(64, 1024, Routing(8, "softmax")),
    ),
}  # fmt: skip
