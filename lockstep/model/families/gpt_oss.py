"""gpt-oss: sinks, windows in every second layer, biases, experts with a clamped activation (arXiv 2508.10925)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

from lockstep.errors import UserError
from lockstep.model.config import ExpertsConfig, ModelConfig, Yarn
from lockstep.model.families.reading import layer_kinds, whole_number
from lockstep.ops.activation import LIMIT, SLOPE
from lockstep.ops.routing import Routing

ARCHITECTURE = "GptOssForCausalLM"
MODEL_TYPE = "gpt_oss"
CONSTANTS = dict(
    vocab_size=201088, tie_embeddings=False, norm_eps=1e-5, rope_theta=150_000.0,
    rope_scaling=Yarn(32.0, 4096, truncate=False), max_positions=131072, attention_bias=True, sinks=True,
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
KINDS = {"sliding_attention": True, "full_attention": False}
"""Layer types and whether they have a window; by default they alternate."""


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
    """Fields of ModelConfig from the keys of `config.json`. Raises UserError."""
    count = whole_number(values, "num_hidden_layers", where)
    kinds = layer_kinds(values, KINDS, where, count) or list(islice(cycle(KINDS), count))
    window = whole_number(values, "sliding_window", where, least=1)
    return {
        "attention_bias": True,
        "sinks": True,
        "windows": shortest_pattern([window if KINDS[kind] else 0 for kind in kinds]),
    }


def shortest_pattern(windows: Sequence[int]) -> tuple[int, ...]:
    """The shortest list whose repetition gives all windows."""
    turns = (tuple(windows[:length]) for length in range(1, len(windows) + 1))
    return next(turn for turn in turns if all(turn[n % len(turn)] == window for n, window in enumerate(windows)))


def write_attention(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `read_attention`. Raises UserError for several window widths, which the keys cannot express."""
    windows = [config.window(layer) for layer in range(config.num_layers)]
    widths = {window for window in windows if window} or {128}
    if len(widths) > 1:
        raise UserError(f"model: windows of {sorted(widths)} tokens; gpt-oss has windows of one width only")
    return {
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        "sliding_window": widths.pop(),
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
