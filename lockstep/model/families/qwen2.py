"""Qwen2 and Qwen2.5: biases on queries, keys and values (arXiv 2407.10671, 2412.15115)."""

from __future__ import annotations

from lockstep.model.families.windows import windows_if_used, write_windows_if_used

ARCHITECTURE = "Qwen2ForCausalLM"
MODEL_TYPE = "qwen2"
CONSTANTS = dict(vocab_size=151936, qkv_bias=True)
DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
"""Defaults of missing keys in a `config.json`: those of transformers' class. `head_dim` follows from `hidden_size`."""
ONLY = {"attention_bias": True, "use_mrope": False}  # the first of which other programs write
WITHOUT_EFFECT = {"dual_chunk_attention_config"}
"""Which vLLM uses for texts of more than 262,144 tokens, and transformers does not."""
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
    "0.5b": dict(dim=896, num_layers=24, num_heads=14, num_kv_heads=2, head_dim=64, intermediate_size=4864),
    "1.5b": dict(dim=1536, num_layers=28, num_heads=12, num_kv_heads=2, head_dim=128, intermediate_size=8960),
    "3b": dict(dim=2048, num_layers=36, num_heads=16, num_kv_heads=2, head_dim=128, intermediate_size=11008),
    "7b": dict(
        vocab_size=152064, dim=3584, num_layers=28, num_heads=28, num_kv_heads=4, head_dim=128,
        intermediate_size=18944, tie_embeddings=False,
    ),
    "14b": dict(
        vocab_size=152064, dim=5120, num_layers=48, num_heads=40, num_kv_heads=8, head_dim=128,
        intermediate_size=13824, tie_embeddings=False,
    ),
    "32b": dict(
        vocab_size=152064, dim=5120, num_layers=64, num_heads=40, num_kv_heads=8, head_dim=128,
        intermediate_size=27648, tie_embeddings=False,
    ),
    "72b": dict(
        vocab_size=152064, dim=8192, num_layers=80, num_heads=64, num_kv_heads=8, head_dim=128,
        intermediate_size=29568, tie_embeddings=False,
    ),
}  # fmt: skip
"""Those of Qwen2.5, with the 32,768 positions of most of its folders."""
