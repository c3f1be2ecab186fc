"""SmolLM3: every fourth layer does not rotate queries and keys (NoPE, arXiv 2501.18795)."""

from __future__ import annotations

from typing import Any

from lockstep.errors import UserError
from lockstep.model.config import ModelConfig
from lockstep.model.families.reading import layer_kinds, whole_number
from lockstep.model.families.rope import FULL, SLIDING
from lockstep.model.families.windows import read_windows, shortest_pattern, write_windows

ARCHITECTURE = "SmolLM3ForCausalLM"
MODEL_TYPE = "smollm3"
CONSTANTS = dict(vocab_size=128256, rope_theta=5_000_000.0, max_positions=65536, rotated=(True, True, True, False))
DEFAULTS = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_theta": 2_000_000.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "pad_token_id": 128004,
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
}
"""Defaults of missing keys in a `config.json`: those of transformers' class. `head_dim` follows from `hidden_size`."""
WITHOUT_EFFECT = {"max_window_layers"}


def read_attention(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Fields of ModelConfig from the keys of `config.json`. Raises UserError."""
    count = whole_number(values, "num_hidden_layers", where)
    rotated = values["no_rope_layers"]  # which has 1 for a layer with a rotary embedding
    if rotated is None:
        interval = whole_number(values, "no_rope_layer_interval", where, least=1)
        rotated = [int((layer + 1) % interval != 0) for layer in range(count)]
    if not isinstance(rotated, list) or len(rotated) < count or any(value not in (0, 1) for value in rotated):
        raise UserError(f"{where}: no_rope_layers is {rotated!r:.100}; it must be a list with 0 or 1 for each layer")
    rotated = [bool(value) for value in rotated[:count]]
    used = values["use_sliding_window"] and values["sliding_window"] is not None
    kinds = [SLIDING if used and not turns else FULL for turns in rotated]
    if not used and SLIDING in (layer_kinds(values, (FULL, SLIDING), where, count) or ()):
        # transformers would apply the windows with some of its attention implementations, and not with others.
        raise UserError(f"{where}: layer_types has {SLIDING}, which needs use_sliding_window and sliding_window")
    return {"rotated": () if all(rotated) else shortest_pattern(rotated), **read_windows(values, where, kinds)}


def write_attention(config: ModelConfig) -> dict[str, Any]:
    """The keys of `config.json`."""
    return write_windows(config) | {
        "use_sliding_window": bool(config.windows),
        "no_rope_layers": [int(config.is_rotated(layer)) for layer in range(config.num_layers)],
    }


PRESETS = {
    "micro": dict(
        vocab_size=258, dim=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=384,
    ),
    "3b": dict(dim=2048, num_layers=36, num_heads=16, num_kv_heads=4, head_dim=128, intermediate_size=11008),
}  # fmt: skip
