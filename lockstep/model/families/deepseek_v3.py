"""DeepSeek-V3: latent attention, a sigmoid router with groups, a shared expert (arXiv 2412.19437)."""

from __future__ import annotations

import re
from typing import Any

from lockstep.errors import UserError
from lockstep.model.config import ExpertsConfig, Latent, ModelConfig
from lockstep.model.families.reading import number, truth, whole_number
from lockstep.model.ropes import Yarn
from lockstep.ops.routing import Routing

ARCHITECTURE = "DeepseekV3ForCausalLM"
MODEL_TYPE = "deepseek_v3"
CONSTANTS = dict(
    vocab_size=129280, num_kv_heads=1, tie_embeddings=False, rope_theta=10_000.0, max_positions=32768
)  # fmt: skip
DEFAULTS = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "rope_interleave": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
}
"""Defaults of missing keys in a `config.json`: those of transformers' class. There are as many key-value heads as
heads."""
ALIASES = {"num_local_experts": "n_routed_experts"}
WITHOUT_EFFECT = {
    "aux_loss_alpha", "seq_aux", "ep_size", "qk_head_dim", "num_nextn_predict_layers", "num_mtp_layers"
}  # fmt: skip
"""Keys for the load-balancing loss, DeepSeek's inference server, and multi-token prediction layers."""
ONLY = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
"""Settings that would change the arithmetic, and their only supported value."""


def _latent(kv_rank: int, nope_dim: int, rope_dim: int, value_dim: int, q_rank: int) -> dict[str, Any]:
    latent = Latent(kv_rank, nope_dim, rope_dim, value_dim, q_rank)
    return {"latent": latent, "head_dim": latent.key_dim}


def _experts(count: int, active: int, size: int, dense_layers: int, groups: int, groups_kept: int) -> ExpertsConfig:
    """Routing as in the paper, with one shared expert."""
    routing = Routing(active, "sigmoid", scale=2.5, groups=groups, groups_kept=groups_kept)
    return ExpertsConfig(count, size, routing, size, choice_bias=True, dense_layers=tuple(range(dense_layers)))


def read_attention(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Fields of ModelConfig from the keys of `config.json`. Raises UserError."""
    compressed = values["q_lora_rank"] is not None  # null means that queries are not compressed
    latent = Latent(
        kv_rank=whole_number(values, "kv_lora_rank", where),
        nope_dim=whole_number(values, "qk_nope_head_dim", where),
        rope_dim=whole_number(values, "qk_rope_head_dim", where),
        value_dim=whole_number(values, "v_head_dim", where),
        q_rank=whole_number(values, "q_lora_rank", where) if compressed else 0,
        interleaved=truth(values, "rope_interleave", where),
    )
    if latent.rope_dim % 2:
        raise UserError(f"{where}: qk_rope_head_dim: rope_dim is {latent.rope_dim}; rotary embedding needs an even one")
    if values.get("head_dim") not in (None, latent.rope_dim):  # transformers would use the frequencies of that width
        raise UserError(f"{where}: head_dim is {values['head_dim']!r:.100}; it must be qk_rope_head_dim, or missing")
    return {"latent": latent, "num_kv_heads": 1, "head_dim": latent.key_dim}


def write_attention(config: ModelConfig) -> dict[str, Any]:
    """The keys of `config.json`, where the number of key-value heads is the number of heads."""
    assert config.latent is not None
    return {
        "kv_lora_rank": config.latent.kv_rank,
        "qk_nope_head_dim": config.latent.nope_dim,
        "qk_rope_head_dim": config.latent.rope_dim,
        "v_head_dim": config.latent.value_dim,
        "q_lora_rank": config.latent.q_rank or None,
        "rope_interleave": config.latent.interleaved,
        "num_key_value_heads": config.num_heads,
        "head_dim": config.latent.rope_dim,
        "num_nextn_predict_layers": 0,
    }


def read_experts(values: dict[str, Any], where: str) -> ExpertsConfig:
    """From the keys of `config.json`. Raises UserError."""
    size = whole_number(values, "moe_intermediate_size", where)
    routing = Routing(
        whole_number(values, "num_experts_per_tok", where),
        "sigmoid",
        normalize=truth(values, "norm_topk_prob", where),
        scale=float(number(values["routed_scaling_factor"], f"{where}: routed_scaling_factor")),
        groups=whole_number(values, "n_group", where),
        groups_kept=whole_number(values, "topk_group", where),
    )
    dense = whole_number(values, "first_k_dense_replace", where)
    return ExpertsConfig(
        whole_number(values, "n_routed_experts", where),
        size,
        routing,
        shared_size=size * whole_number(values, "n_shared_experts", where),
        choice_bias=True,
        dense_layers=tuple(range(min(dense, whole_number(values, "num_hidden_layers", where)))),
    )


def write_experts(config: ModelConfig) -> dict[str, Any]:
    """The keys of `config.json`."""
    assert config.experts is not None
    experts, routing = config.experts, config.experts.routing
    return {
        "n_routed_experts": experts.count,
        "num_experts_per_tok": routing.active,
        "moe_intermediate_size": experts.intermediate_size,
        "n_shared_experts": experts.shared_size // experts.intermediate_size,
        "first_k_dense_replace": len(experts.dense_layers),
        "n_group": routing.groups,
        "topk_group": routing.groups_kept,
        "norm_topk_prob": routing.normalize,
        "routed_scaling_factor": routing.scale,
        **ONLY,
    }


def is_ignored(name: str, config: ModelConfig) -> bool:
    """The multi-token prediction layers, after the last layer."""
    layer = re.match(r"model\.layers\.([0-9]{1,9})\.", name)
    return layer is not None and int(layer[1]) >= config.num_layers


PRESETS: dict[str, dict[str, Any]] = {
    "micro": dict(
        vocab_size=258, dim=128, num_layers=4, num_heads=4, intermediate_size=384, **_latent(64, 32, 32, 32, q_rank=96),
        experts=_experts(8, 2, 128, dense_layers=1, groups=2, groups_kept=1),
    ),
    "tiny": dict(
        vocab_size=2048, dim=256, num_layers=6, num_heads=4, intermediate_size=1024,
        **_latent(128, 64, 32, 64, q_rank=192),
        experts=_experts(16, 4, 256, dense_layers=1, groups=4, groups_kept=2),
    ),
    "671b": dict(
        dim=7168, num_layers=61, num_heads=128, intermediate_size=18432, **_latent(512, 128, 64, 128, q_rank=1536),
        experts=_experts(256, 8, 2048, dense_layers=3, groups=8, groups_kept=4), max_positions=163840,
        rope_scaling=Yarn(40.0, 4096, 32, 1, mscale=1.0, mscale_all_dim=1.0),
    ),
}  # fmt: skip
