"""Qwen3, dense: query and key norm, explicit head size, no biases (arXiv 2505.09388)."""

from __future__ import annotations

from lockstep.model.families import qwen2
from lockstep.model.families.windows import windows_if_used, write_windows_if_used

ARCHITECTURE = "Qwen3ForCausalLM"
MODEL_TYPE = "qwen3"
CONSTANTS = dict(vocab_size=151936, qk_norm="head")
"""Fields of ModelConfig that are the same for all sizes, unless a size has its own."""
DEFAULTS = qwen2.DEFAULTS | {"head_dim": 128, "attention_bias": False}
"""Defaults of missing keys in a `config.json`: those of transformers' class."""
ONLY = {"use_qk_norm": True}
read_attention, write_attention = windows_if_used, write_windows_if_used


PRESETS = {
    "micro": dict(
        vocab_size=258, dim=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=384,
    ),
    "tiny": dict(
        vocab_size=2048, dim=256, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=64, intermediate_size=1024,
    ),
    "small": dict(
        vocab_size=32000, dim=768, num_layers=12, num_heads=12, num_kv_heads=12, head_dim=64, intermediate_size=2048,
    ),
    "0.6b": dict(dim=1024, num_layers=28, num_heads=16, num_kv_heads=8, head_dim=128, intermediate_size=3072),
    "1.7b": dict(dim=2048, num_layers=28, num_heads=16, num_kv_heads=8, head_dim=128, intermediate_size=6144),
    "4b": dict(dim=2560, num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128, intermediate_size=9728),
    "8b": dict(
        dim=4096, num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128, intermediate_size=12288,
        tie_embeddings=False,
    ),
    "14b": dict(
        dim=5120, num_layers=40, num_heads=40, num_kv_heads=8, head_dim=128, intermediate_size=17408,
        tie_embeddings=False,
    ),
    "32b": dict(
        dim=5120, num_layers=64, num_heads=64, num_kv_heads=8, head_dim=128, intermediate_size=25600,
        tie_embeddings=False,
    ),
}  # fmt: skip
