"""OLMo 3: OLMo 2 with a sliding window in three of four layers, whose rotary embedding is not stretched."""

from __future__ import annotations

from typing import Any

from lockstep.model.config import ModelConfig
from lockstep.model.families import olmo2
from lockstep.model.families.reading import whole_number
from lockstep.model.families.rope import FULL, SLIDING, RopeKeys
from lockstep.model.families.windows import read_windows, write_windows
from lockstep.model.ropes import Rope, Yarn

ARCHITECTURE = "Olmo3ForCausalLM"
MODEL_TYPE = "olmo3"
CONSTANTS = olmo2.CONSTANTS | dict(
    vocab_size=100278, norm_eps=1e-6, max_positions=65536, windows=(4096, 4096, 4096, 0),
    rope_scaling=Yarn(8.0, 8192, attention_factor=1.2079441541679836), window_rope=Rope(500_000.0),
)  # fmt: skip
DEFAULTS = olmo2.DEFAULTS | {"rope_theta": 500_000.0, "sliding_window": 4096}
"""Defaults of missing keys in a `config.json`: those of transformers' class."""
ROPE_KEYS = RopeKeys(by_kind=True, window_theta=500_000.0)


def read_attention(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Fields of ModelConfig from the keys of `config.json`. Raises UserError."""
    count = whole_number(values, "num_hidden_layers", where)
    return read_windows(values, where, [FULL if layer % 4 == 3 else SLIDING for layer in range(count)])


def write_attention(config: ModelConfig) -> dict[str, Any]:
    """The keys of `config.json`; transformers needs a width even if no layer has a window."""
    return write_windows(config, otherwise=4096)


PRESETS: dict[str, dict[str, Any]] = {
    "micro": dict(
        vocab_size=258, dim=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=384,
        windows=(20, 20, 20, 0), rope_scaling=Yarn(8.0, 64), max_positions=512,
    ),
    "7b": dict(dim=4096, num_layers=32, num_heads=32, num_kv_heads=32, head_dim=128, intermediate_size=11008),
    "32b": dict(dim=5120, num_layers=64, num_heads=40, num_kv_heads=8, head_dim=128, intermediate_size=27648),
}  # fmt: skip
