"""The families by name, and what is asked of one's file."""

from __future__ import annotations

from types import ModuleType

from lockstep.model.config import ModelConfig
from lockstep.model.families import (
    deepseek_v3,
    gemma3,
    glm,
    glm4,
    glm4_moe,
    gpt_oss,
    granite,
    llama3,
    ministral,
    ministral3,
    mistral,
    nanochat,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    smollm3,
)
from lockstep.model.families.own import own_family
from lockstep.model.families.rope import RopeKeys
from lockstep.model.stored import HEAD

FAMILIES: dict[str, ModuleType] = {
    "llama3": llama3,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "qwen3_next": qwen3_next,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5_moe,
    "gpt_oss": gpt_oss,
    "deepseek_v3": deepseek_v3,
    "qwen2": qwen2,
    "gemma3": gemma3,
    "mistral": mistral,
    "ministral": ministral,
    "ministral3": ministral3,
    "smollm3": smollm3,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "olmoe": olmoe,
    "phi3": phi3,
    "granite": granite,
    "glm": glm,
    "glm4": glm4,
    "glm4_moe": glm4_moe,
    "nanochat": nanochat,
}
OTHER_MODEL_TYPES = {"kimi_k2": "deepseek_v3"}
QUANTIZED = ("fp8", "compressed-tensors", "torchao")
"""Quantized forms of folders that are read for every family without a list of its own."""


def family_module(name: str) -> ModuleType:
    """The file of a ModelConfig's family: Lockstep's, or the user's at a path. Raises UserError."""
    return FAMILIES[name] if name in FAMILIES else own_family(name)


def stem(module: ModuleType) -> str:
    """What the names of a family's other classes in transformers begin with."""
    return str(getattr(module, "STEM", module.ARCHITECTURE.removesuffix("ForCausalLM")))


def scoring_class(module: ModuleType) -> str:
    """The name in transformers of the class with a score head."""
    return f"{stem(module)}ForSequenceClassification"


def rope_keys(module: ModuleType) -> RopeKeys:
    """What is particular to a family's keys of the rotary embedding."""
    keys: RopeKeys = getattr(module, "ROPE_KEYS", RopeKeys())
    return keys


def quantized_methods(family: str) -> tuple[str, ...]:
    """The quantized forms of folders that are read for a family, by `quant_method`."""
    methods: tuple[str, ...] = getattr(family_module(family), "QUANTIZED", QUANTIZED)
    return methods


def is_copy(name: str, config: ModelConfig) -> bool:
    """Whether a tensor in a folder is redundant: older folders' rotary frequencies, and a tied head."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_embeddings and name == HEAD)


def is_ignored(name: str, config: ModelConfig) -> bool:
    """Whether the model does not use a tensor in a folder: a copy, or one that a family or a reward model ignores."""
    if is_copy(name, config) or (config.score_head and name == HEAD):
        return True
    module = family_module(config.family)
    return hasattr(module, "is_ignored") and module.is_ignored(name, config)
