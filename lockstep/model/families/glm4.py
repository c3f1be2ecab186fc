"""GLM-4-0414: GLM with norms around attention and feed-forward."""

from __future__ import annotations

from typing import Any

from lockstep.model.config import Norms
from lockstep.model.families import glm
from lockstep.model.families.glm import DEFAULTS, NULL_IS_MISSING, ROPE_KEYS, read_attention

__all__ = ["DEFAULTS", "NULL_IS_MISSING", "ROPE_KEYS", "read_attention"]

ARCHITECTURE = "Glm4ForCausalLM"
MODEL_TYPE = "glm4"
CONSTANTS = glm.CONSTANTS | dict(
    norm_eps=1e-5, max_positions=32768, qkv_bias=False,
    norms=Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
)  # fmt: skip

PRESETS: dict[str, dict[str, Any]] = {
    "micro": glm.PRESETS["micro"],
    "9b": glm.PRESETS["9b"] | dict(qkv_bias=True),
    "32b": dict(dim=6144, num_layers=61, num_heads=48, num_kv_heads=2, head_dim=128, intermediate_size=23040),
}
"""9b has biases on queries, keys and values (`qkv_bias`)."""
