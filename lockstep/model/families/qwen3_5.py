"""Qwen3.5, dense: three layers with a gated delta network (arXiv 2412.06464) for one with gated attention
(arXiv 2505.06708), norms with factors 1 + w, a quarter of each head rotated."""

from __future__ import annotations

from typing import Any

from lockstep.model.config import DeltaNet, ModelConfig
from lockstep.model.families.reading import layer_kinds, whole_number
from lockstep.model.families.rope import FULL, RopeKeys
from lockstep.model.families.windows import shortest_pattern

ARCHITECTURE, STEM = "Qwen3_5ForCausalLM", "Qwen3_5Text"
MODEL_TYPE = "qwen3_5_text"
CONSTANTS: dict[str, Any] = dict(
    vocab_size=248320, rope_theta=10_000_000.0, max_positions=262144, head_dim=256, rotated_features=64,
    norm_offset=True, qk_norm="head", attention_gate=True, delta_layers=(True, True, True, False),
)  # fmt: skip
DEFAULTS: dict[str, Any] = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.25,
    "attention_bias": False,
    "layer_types": None,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
"""Defaults of missing keys in a `config.json`: those of transformers' class."""
ONLY = {"attn_output_gate": True, "output_gate_type": "swish", "mlp_only_layers": []}
WITHOUT_EFFECT = {"mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}
"""The state is always float32; the others are of multi-token prediction layers."""
ROPE_KEYS = RopeKeys(partial=True, more=("mrope_section", "mrope_interleaved"))
"""The further keys distribute frequencies over an image's axes: a text has the same position on all of them."""
LINEAR = "linear_attention"


def read_attention(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Fields of ModelConfig from the keys of `config.json`. Raises UserError."""
    return read_delta(values, where, fused=False)


def read_delta(values: dict[str, Any], where: str, fused: bool) -> dict[str, Any]:
    """As `read_attention`, for projections that are `fused` or not."""
    count = whole_number(values, "num_hidden_layers", where, least=1)
    kinds = layer_kinds(values, (LINEAR, FULL), where, count)
    if kinds is None:
        turn = whole_number(values, "full_attention_interval", where, least=1)
        kinds = [LINEAR if (layer + 1) % turn else FULL for layer in range(count)]
    sizes = DeltaNet(
        whole_number(values, "linear_num_key_heads", where, least=1),
        whole_number(values, "linear_num_value_heads", where, least=1),
        whole_number(values, "linear_key_head_dim", where, least=1),
        whole_number(values, "linear_value_head_dim", where, least=1),
        whole_number(values, "linear_conv_kernel_dim", where, least=2),
        fused,
    )
    return {"delta": sizes, "delta_layers": shortest_pattern([kind == LINEAR for kind in kinds])}


def write_attention(config: ModelConfig) -> dict[str, Any]:
    """The keys of `config.json`."""
    # The state's dtype and the gate are vLLM's keys: without the first, its state would have the model's dtype.
    return write_delta(config) | {"mtp_num_hidden_layers": 0, "mamba_ssm_dtype": "float32", "attn_output_gate": True}


def write_delta(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `read_delta`."""
    assert config.delta is not None
    return {
        "layer_types": [LINEAR if config.is_delta(layer) else FULL for layer in range(config.num_layers)],
        "linear_num_key_heads": config.delta.key_heads,
        "linear_num_value_heads": config.delta.value_heads,
        "linear_key_head_dim": config.delta.key_dim,
        "linear_value_head_dim": config.delta.value_dim,
        "linear_conv_kernel_dim": config.delta.width,
    }


def is_ignored(name: str, config: ModelConfig) -> bool:
    """The multi-token prediction layers and the vision tower, which transformers ignores in a language model."""
    return name.startswith(("mtp.", "model.visual."))


MICRO: dict[str, Any] = dict(
    vocab_size=258, dim=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, rotated_features=8
)  # fmt: skip
TINY: dict[str, Any] = dict(
    vocab_size=2048, dim=256, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=64, rotated_features=16
)  # fmt: skip
"""What the small sizes of the three families share."""
PRESETS: dict[str, dict[str, Any]] = {
    "micro": MICRO | dict(intermediate_size=384, delta=DeltaNet(2, 4, 32, 32)),
    "tiny": TINY | dict(intermediate_size=1024, delta=DeltaNet(2, 4, 64, 64)),
    "small": dict(
        vocab_size=32000, dim=1024, num_layers=24, num_heads=8, num_kv_heads=2, intermediate_size=3584,
        delta=DeltaNet(16, 16, 128, 128),
    ),
    "0.8b": dict(
        dim=1024, num_layers=24, num_heads=8, num_kv_heads=2, intermediate_size=3584,
        delta=DeltaNet(16, 16, 128, 128),
    ),
    "2b": dict(
        dim=2048, num_layers=24, num_heads=8, num_kv_heads=2, intermediate_size=6144,
        delta=DeltaNet(16, 16, 128, 128),
    ),
    "4b": dict(
        dim=2560, num_layers=32, num_heads=16, num_kv_heads=4, intermediate_size=9216,
        delta=DeltaNet(16, 32, 128, 128),
    ),
    "9b": dict(
        dim=4096, num_layers=32, num_heads=16, num_kv_heads=4, intermediate_size=12288,
        delta=DeltaNet(16, 32, 128, 128), tie_embeddings=False,
    ),
    "27b": dict(
        dim=5120, num_layers=64, num_heads=24, num_kv_heads=4, intermediate_size=17408,
        delta=DeltaNet(16, 48, 128, 128), tie_embeddings=False,
    ),
}  # fmt: skip
