"""gpt-oss: sinks, windows in every second layer, biases, experts with a clamped activation (arXiv 2508.10925)."""

from __future__ import annotations

from itertools import cycle, islice
from typing import Any

from lockstep.errors import UserError
from lockstep.model.config import ExpertsConfig, ModelConfig
from lockstep.model.families.reading import whole_number
from lockstep.model.families.windows import KINDS, read_windows, write_windows
from lockstep.model.ropes import Yarn
from lockstep.ops.activation import LIMIT, SLOPE
from lockstep.ops.routing import Routing

ARCHITECTURE = "GptOssForCausalLM"
MODEL_TYPE = "gpt_oss"
CONSTANTS = dict(
    vocab_size=201088, tie_embeddings=False, norm_eps=1e-5, rope_theta=150_000.0,
    rope_scaling=Yarn(32.0, 4096, truncate=False), max_positions=131072, qkv_bias=True, output_bias=True, sinks=True,
)  # fmt: skip
ONLY = {"attention_bias": True, "swiglu_alpha": SLOPE, "swiglu_limit": LIMIT}
"""Settings that would change the arithmetic, and their only supported value."""
QUANTIZED = ("mxfp4",)
"""Quantized forms of folders that are read: of the experts."""
DEFAULTS = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 150_000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
}
"""Defaults of missing keys in a `config.json`: those of transformers' class."""
ALIASES = {"num_experts": "num_local_experts"}
WITHOUT_EFFECT = {"initial_context_length", "router_aux_loss_coef", "experts_per_token"}
"""transformers reads `num_experts_per_tok`; `experts_per_token` must be equal."""


def _experts(count: int, size: int, active: int) -> ExpertsConfig:
    return ExpertsConfig(count, size, Routing(active, "softmax_of_chosen"), clamped=True)


def read_experts(values: dict[str, Any], where: str) -> ExpertsConfig:
    """From the keys of `config.json`. Raises UserError."""
    active = whole_number(values, "num_experts_per_tok", where)
    if values.get("experts_per_token") not in (None, active):
        raise UserError(
            f"{where}: experts_per_token is {values['experts_per_token']!r:.100}, but num_experts_per_tok is {active}"
            " (by default 4); give both the same value"
        )
    experts = whole_number(values, "num_local_experts", where)
    return _experts(experts, whole_number(values, "intermediate_size", where), active)


def write_experts(config: ModelConfig) -> dict[str, Any]:
    """The keys of `config.json`, for old and new transformers."""
    assert config.experts is not None
    return {
        "num_local_experts": config.experts.count,
        "num_experts_per_tok": config.experts.routing.active,
        "experts_per_token": config.experts.routing.active,
    }


def read_attention(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Fields of ModelConfig from the keys of `config.json`; windows alternate by default. Raises UserError."""
    kinds = list(islice(cycle(KINDS), whole_number(values, "num_hidden_layers", where)))
    return {"qkv_bias": True, "output_bias": True, "sinks": True, **read_windows(values, where, kinds)}


def write_attention(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `read_attention`. Raises UserError for several window widths, which the keys cannot express."""
    return write_windows(config, otherwise=128) | {
        "attention_bias": True,
        "swiglu_alpha": SLOPE,
        "swiglu_limit": LIMIT,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "micro": dict(
        vocab_size=258, dim=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=128,
        experts=_experts(8, 128, 2), windows=(20, 0),
    ),
    "20b": dict(
        dim=2880, num_layers=24, num_heads=64, num_kv_heads=8, head_dim=64, intermediate_size=2880,
        experts=_experts(32, 2880, 4), windows=(128, 0),
    ),
    "120b": dict(
        dim=2880, num_layers=36, num_heads=64, num_kv_heads=8, head_dim=64, intermediate_size=2880,
        experts=_experts(128, 2880, 4), windows=(128, 0),
    ),
}  # fmt: skip
