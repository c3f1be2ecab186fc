"""A family of your own: norms around both halves, GELU, and every fourth layer without a rotary embedding.

lockstep pretrain --model my_family.py:tiny --output run        # a size, or my_family.py:config
lockstep generate --model my_family.py:run --prompt "def "      # a folder that the family wrote

`docs/models.md` says what a family's file has.
"""

from __future__ import annotations

import math
from typing import Any

from lockstep.model.config import ModelConfig, Norms
from lockstep.model.families.reading import number, whole_number

ARCHITECTURE = "MyForCausalLM"
MODEL_TYPE = "my_family"
CONSTANTS = dict(
    qk_norm="head", activation="gelu_tanh",
    norms=Norms(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    ),
    rotated=(True, True, True, False), rope_theta=100_000.0,
)  # fmt: skip
"""Fields of `lockstep.model.ModelConfig` for all sizes."""
DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 100_000.0,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "no_rope_every": 4,
    "embedding_multiplier": 1.0,
}
"""The keys of `config.json` that the family reads besides those of all families, with what a missing one means."""
ONLY = {"hidden_act": "gelu_pytorch_tanh"}


def read_attention(values: dict[str, Any], where: str) -> dict[str, Any]:
    """The fields of ModelConfig that `config.json` has in keys of the family's own."""
    every = whole_number(values, "no_rope_every", where, least=1)
    return {
        "rotated": (True,) * (every - 1) + (False,),
        "embedding_scale": float(number(values["embedding_multiplier"], f"{where}: embedding_multiplier")),
    }


def write_attention(config: ModelConfig) -> dict[str, Any]:
    """The inverse."""
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "no_rope_every": len(config.rotated),
        "embedding_multiplier": config.embedding_scale,
    }


def size(dim: int, layers: int, heads: int) -> dict[str, Any]:
    """A size with heads of 64 features, each key-value head shared by two."""
    return dict(
        vocab_size=2048, dim=dim, num_layers=layers, num_heads=heads, num_kv_heads=heads // 2, head_dim=64,
        intermediate_size=4 * dim, embedding_scale=math.sqrt(dim),
    )  # fmt: skip


PRESETS = {"tiny": size(128, 4, 2), "small": size(512, 8, 8)}
config = ModelConfig(family=__file__, **CONSTANTS | size(256, 8, 4))
"""Another way to name a shape: `my_family.py:config`."""
