"""Qwen3-Next: Qwen3.5's layers, with a mixture of experts whose shared expert has a gate, and linear attention whose
projections are two weights."""

from __future__ import annotations

from functools import partial
from typing import Any

from lockstep.model.config import DeltaNet, ExpertsConfig, ModelConfig
from lockstep.model.families import qwen3_5, qwen3_moe
from lockstep.model.families.qwen3_5 import MICRO, TINY, read_delta, write_delta
from lockstep.model.families.reading import whole_number
from lockstep.model.families.rope import RopeKeys
from lockstep.ops.routing import Routing

ARCHITECTURE = "Qwen3NextForCausalLM"
MODEL_TYPE = "qwen3_next"
CONSTANTS: dict[str, Any] = qwen3_5.CONSTANTS | dict(vocab_size=151936, tie_embeddings=False)
DEFAULTS = qwen3_5.DEFAULTS | {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
}
"""Defaults of missing keys in a `config.json`: those of transformers' class."""
ONLY = {"attn_output_gate": True}
WITHOUT_EFFECT = {"router_aux_loss_coef", "mamba_ssm_dtype", "num_nextn_predict_layers", "num_mtp_layers"}
ROPE_KEYS = RopeKeys(partial=True)
read_attention = partial(read_delta, fused=True)
write_attention = write_delta


def read_experts(values: dict[str, Any], where: str) -> ExpertsConfig:
    """From the keys of `config.json`. Raises UserError."""
    experts = qwen3_moe.read_experts(values, where)
    size = whole_number(values, "shared_expert_intermediate_size", where, least=1)
    return with_shared_expert(experts, size)


def with_shared_expert(experts: ExpertsConfig, size: int) -> ExpertsConfig:
    """With a shared expert that has a gate."""
    return ExpertsConfig(
        experts.count,
        experts.intermediate_size,
        experts.routing,
        shared_size=size,
        shared_gate=True,
        dense_layers=experts.dense_layers,
    )


def write_experts(config: ModelConfig) -> dict[str, Any]:
    """The keys of `config.json`, for old and new transformers."""
    assert config.experts is not None
    keys = qwen3_moe.write_experts(config) | {"shared_expert_intermediate_size": config.experts.shared_size}
    del keys["num_local_experts"]
    return keys


def is_ignored(name: str, config: ModelConfig) -> bool:
    """The multi-token prediction layers."""
    return name.startswith("mtp.")


def mixture(count: int, active: int, size: int) -> dict[str, Any]:
    """Experts with a shared one of the same size; the dense size, which no layer uses, is that of all active ones."""
    experts = ExpertsConfig(count, size, Routing(active), shared_size=size, shared_gate=True)
    return {"intermediate_size": active * size, "experts": experts}


PRESETS: dict[str, dict[str, Any]] = {
    "micro": MICRO | mixture(8, 2, 128) | dict(delta=DeltaNet(2, 4, 32, 32, fused=True), tie_embeddings=True),
    "tiny": TINY | mixture(16, 4, 256) | dict(delta=DeltaNet(2, 4, 64, 64, fused=True), tie_embeddings=True),
    "80b-a3b": dict(
        dim=2048, num_layers=48, num_heads=16, num_kv_heads=2, **mixture(512, 10, 512),
        delta=DeltaNet(16, 32, 128, 128, fused=True),
    ),
}  # fmt: skip
