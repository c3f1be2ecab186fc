"""Ministral 3: YaRN, and queries that grow with their position; the text part of its models with images."""

from __future__ import annotations

from typing import Any

from lockstep.errors import UserError
from lockstep.model.config import ModelConfig
from lockstep.model.families import rope
from lockstep.model.families.reading import number
from lockstep.model.families.rope import RopeKeys
from lockstep.model.families.windows import same_window, write_same_window
from lockstep.model.ropes import LongQueries, Yarn

ARCHITECTURE = "Ministral3ForCausalLM"
MODEL_TYPE = "ministral3"
BETA, ORIGINAL = "llama_4_scaling_beta", "original_max_position_embeddings"
CONSTANTS = dict(
    vocab_size=131072, norm_eps=1e-5, max_positions=262144, long_queries=LongQueries(0.1, 16384),
    rope_scaling=Yarn(16.0, 16384, mscale=1.0, mscale_all_dim=1.0),
)  # fmt: skip
DEFAULTS = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 11,
    "sliding_window": None,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        ORIGINAL: 16384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        BETA: 0.1,
    },
}
"""Defaults of missing keys in a `config.json`: those of transformers' class."""
ROPE_KEYS = RopeKeys(more=(BETA, "max_position_embeddings"))


def read_attention(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Fields of ModelConfig from the keys of `config.json`. Raises UserError."""
    name = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    table = values.get(name)
    if not isinstance(table, dict) or table.get(BETA) is None or table.get(ORIGINAL) is None:
        raise UserError(f"{where}: {name} needs {BETA} and {ORIGINAL}, by which queries grow with their position")
    # As in transformers, a top-level key takes precedence for the types of rotary embedding that read it.
    is_read = ORIGINAL in values and table.get("rope_type", table.get("type")) in ("yarn", "llama3", "longrope")
    beta = number(table[BETA], f"{where}: {name}: {BETA}")
    original = number((values if is_read else table)[ORIGINAL], f"{where}: {name}: {ORIGINAL}")
    return {"long_queries": LongQueries(beta, original), **same_window(values, where)}


write_attention = write_same_window


def write_rope(config: ModelConfig, keys: RopeKeys) -> dict[str, Any]:
    """The keys of `config.json` for the rotary embedding, with those of growing queries in its tables."""
    assert config.long_queries is not None
    more = {BETA: config.long_queries.beta, ORIGINAL: config.long_queries.original_max_positions}
    written = rope.write_rope(config, keys)
    return written | {key: written[key] | more for key in ("rope_scaling", "rope_parameters") if written[key]}


PRESETS: dict[str, dict[str, Any]] = {
    "micro": dict(
        vocab_size=258, dim=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=384,
        long_queries=LongQueries(0.1, 64), rope_scaling=Yarn(16.0, 64, mscale=1.0, mscale_all_dim=1.0),
        max_positions=1024,
    ),
    "3b": dict(dim=3072, num_layers=26, num_heads=32, num_kv_heads=8, head_dim=128, intermediate_size=9216),
    "8b": dict(
        dim=4096, num_layers=34, num_heads=32, num_kv_heads=8, head_dim=128, intermediate_size=14336,
        tie_embeddings=False,
    ),
    "14b": dict(
        dim=5120, num_layers=40, num_heads=32, num_kv_heads=8, head_dim=128, intermediate_size=16384,
        tie_embeddings=False,
    ),
}  # fmt: skip
