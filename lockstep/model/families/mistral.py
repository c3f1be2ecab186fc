"""Mistral: Llama's blocks with a sliding window in all layers, or none (arXiv 2310.06825)."""

from __future__ import annotations

from lockstep.model.families.windows import same_window, write_same_window

ARCHITECTURE = "MistralForCausalLM"
MODEL_TYPE = "mistral"
CONSTANTS = dict(vocab_size=32768, tie_embeddings=False, norm_eps=1e-5)
DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": 4096,
}
"""Defaults of missing keys in a `config.json`: those of transformers' class. `head_dim` follows from `hidden_size`."""
read_attention, write_attention = same_window, write_same_window

PRESETS = {
    "micro": dict(
        vocab_size=258, dim=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=384,
        windows=(20,),
    ),
    "7b": dict(dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, intermediate_size=14336),
    "24b": dict(
        vocab_size=131072, dim=5120, num_layers=40, num_heads=32, num_kv_heads=8, head_dim=128,
        intermediate_size=32768, rope_theta=100_000_000.0,
    ),
}  # fmt: skip
"""7b is version 0.3, 24b Mistral Small 3."""
