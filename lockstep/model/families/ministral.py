"""Ministral: Mistral with a sliding window in some layers."""

from __future__ import annotations

from typing import Any

from lockstep.model.config import ModelConfig
from lockstep.model.families.mistral import CONSTANTS, DEFAULTS
from lockstep.model.families.reading import whole_number
from lockstep.model.families.rope import FULL, SLIDING
from lockstep.model.families.windows import read_windows, write_windows

__all__ = ["CONSTANTS", "DEFAULTS"]

ARCHITECTURE = "MinistralForCausalLM"
MODEL_TYPE = "ministral"


def read_attention(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Fields of ModelConfig from the keys of `config.json`. Raises UserError."""
    kind = FULL if values.get("sliding_window") is None else SLIDING
    return read_windows(values, where, [kind] * whole_number(values, "num_hidden_layers", where))


def write_attention(config: ModelConfig) -> dict[str, Any]:
    """The keys of `config.json`; transformers needs a width even if no layer has a window."""
    return write_windows(config, otherwise=4096)


PRESETS = {
    "micro": dict(
        vocab_size=258, dim=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=384,
        windows=(0, 20, 20, 20),
    ),
    "8b": dict(
        vocab_size=131072, dim=4096, num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128,
        intermediate_size=12288, rope_theta=100_000_000.0, windows=(0, 32768, 32768, 32768),
    ),
}  # fmt: skip
