"""Gemma 3's language model: norms around both halves, with factors 1 + w, scaled embeddings, and five layers with a
sliding window for one without, with a rotary embedding of their own (arXiv 2503.19786)."""

from __future__ import annotations

import math
from typing import Any

from lockstep.model.config import ModelConfig, Norms
from lockstep.model.families.reading import number, whole_number
from lockstep.model.families.rope import FULL, SLIDING, RopeKeys
from lockstep.model.families.windows import read_windows, write_windows
from lockstep.model.ropes import LinearRope, Rope

ARCHITECTURE, STEM = "Gemma3ForCausalLM", "Gemma3Text"
MODEL_TYPE = "gemma3_text"
CONSTANTS: dict[str, Any] = dict(
    vocab_size=262208, max_positions=131072, norm_offset=True, qk_norm="head", activation="gelu_tanh",
    norms=Norms(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    ),
    window_rope=Rope(10_000.0), rope_scaling=LinearRope(8.0), head_dim=256,
)  # fmt: skip
DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": None,
}
"""Defaults of missing keys in a `config.json`: those of transformers' class."""
ONLY = {
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_act": "gelu_pytorch_tanh",
    "attn_logit_softcapping": None,
    "use_bidirectional_attention": False,
}
"""Settings that would change the arithmetic, and their only supported value."""
WITHOUT_EFFECT = {"query_pre_attn_scaler", "_sliding_window_pattern"}
"""The pattern is without effect beside `layer_types`, and transformers reads it from `sliding_window_pattern` alone."""
ROPE_KEYS = RopeKeys(by_kind=True)


def read_attention(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Fields of ModelConfig from the keys of `config.json`. Raises UserError."""
    count = whole_number(values, "num_hidden_layers", where)
    turn = whole_number(values, "sliding_window_pattern", where, least=1)
    kinds = [SLIDING if (layer + 1) % turn else FULL for layer in range(count)]
    scalar = number(values["query_pre_attn_scalar"], f"{where}: query_pre_attn_scalar")
    return {
        "attention_scale": scalar**-0.5,
        "embedding_scale": math.sqrt(whole_number(values, "hidden_size", where, least=1)),
        **read_windows(values, where, kinds),
    }


def write_attention(config: ModelConfig) -> dict[str, Any]:
    """The keys of `config.json`."""
    assert config.attention_scale is not None
    scalar = config.attention_scale**-2
    return write_windows(config, otherwise=4096) | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round(scalar) if round(scalar) ** -0.5 == config.attention_scale else scalar,
        "rope_local_base_freq": (config.window_rope or Rope(10_000.0)).theta,
    }


def _size(window: int, dim: int, queries: int = 256, **sizes: Any) -> dict[str, Any]:
    return dict(
        dim=dim, windows=(*[window] * 5, 0), attention_scale=queries**-0.5, embedding_scale=math.sqrt(dim), **sizes
    )  # fmt: skip


PRESETS: dict[str, dict[str, Any]] = {
    "micro": _size(
        20, 128, 32, vocab_size=258, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=384,
    ),
    "270m": _size(
        512, 640, vocab_size=262144, num_layers=18, num_heads=4, num_kv_heads=1, intermediate_size=2048,
        max_positions=32768, rope_scaling=None,
    ),
    "1b": _size(
        512, 1152, vocab_size=262144, num_layers=26, num_heads=4, num_kv_heads=1, intermediate_size=6912,
        max_positions=32768, rope_scaling=None,
    ),
    "4b": _size(1024, 2560, num_layers=34, num_heads=8, num_kv_heads=4, intermediate_size=10240),
    "12b": _size(1024, 3840, num_layers=48, num_heads=16, num_kv_heads=8, intermediate_size=15360),
    "27b": _size(
        1024, 5376, 168, num_layers=62, num_heads=32, num_kv_heads=16, head_dim=128, intermediate_size=21504,
    ),
}  # fmt: skip
