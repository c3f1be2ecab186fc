"""Phi-3 and Phi-4: fused projections, LongRoPE, and in Phi-4-mini a partial rotary embedding (arXiv 2404.14219,
2503.01743)."""

from __future__ import annotations

from typing import Any

from lockstep.model.families.rope import RopeKeys
from lockstep.model.families.windows import same_window, write_same_window

ARCHITECTURE = "Phi3ForCausalLM"
MODEL_TYPE = "phi3"
CONSTANTS = dict(
    vocab_size=100352, tie_embeddings=False, norm_eps=1e-5, rope_theta=250_000.0, max_positions=16384,
    fused=("qkv_proj", "gate_up_proj"),
)  # fmt: skip
DEFAULTS = {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "bos_token_id": 1,
    "eos_token_id": 32000,
    "pad_token_id": 32000,
    "sliding_window": None,
}
"""Defaults of missing keys in a `config.json`: those of transformers' class. There are as many key-value heads as
heads, and `head_dim` follows from `hidden_size`."""
ONLY = {"lm_head_bias": False, "full_attn_mod": 1, "interpolate_factor": 1}
"""Settings of Phi-4-mini's folder that would change the arithmetic, and their only supported value."""
ROPE_KEYS = RopeKeys(partial=True, aliases={"su": "longrope", "yarn": "longrope"})
read_attention, write_attention = same_window, write_same_window

PRESETS: dict[str, dict[str, Any]] = {
    "micro": dict(
        vocab_size=258, dim=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=384,
        rotated_features=24,
    ),
    "14b": dict(dim=5120, num_layers=40, num_heads=40, num_kv_heads=10, head_dim=128, intermediate_size=17920),
}  # fmt: skip
"""14b is Phi-4. The mini sizes have a list of LongRoPE's factors, which only their folders have."""
