"""Recipes by name: each a function that returns a config."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lockstep.config import (
    DataConfig,
    EngineConfig,
    ParallelConfig,
    PretrainConfig,
    RecomputeConfig,
    RLConfig,
    SFTConfig,
    TrainConfig,
)
from lockstep.errors import UserError, closest
from lockstep.rl.environments.gsm8k import TEMPLATE as GSM8K_TEMPLATE


def tiny() -> PretrainConfig:
    """A 5M-parameter model on the standard library's source, byte by byte."""
    return PretrainConfig(model="qwen3:tiny", steps=200, tokens_per_step=8192, sequence_length=256)


def from_scratch(model: str, learning_rate: float, recompute: str = "none", **parallel: int) -> PretrainConfig:
    """A preset from scratch, for a cluster: 4M tokens per step in rows of 8192; give --data and --tokenizer.

    Ranks that `parallel` does not use shard the weights (FSDP2).
    """
    return PretrainConfig(
        model=model,
        steps=10_000,
        tokens_per_step=4 * 2**20,
        sequence_length=8192,
        dtype="bfloat16",
        train=TrainConfig(learning_rate=learning_rate, warmup_steps=200, weight_decay=0.1, tokens_per_microbatch=8192),
        parallel=ParallelConfig(**parallel),  # type: ignore[arg-type]
        recompute=RecomputeConfig(mode=recompute),  # type: ignore[arg-type]
    )


FROM_SCRATCH: dict[str, Callable[[], PretrainConfig]] = {
    "llama3_1b": partial(from_scratch, "llama3:1b", 6e-4),
    "llama3_3b": partial(from_scratch, "llama3:3b", 4e-4),
    "llama3_8b": partial(from_scratch, "llama3:8b", 3e-4, "selective"),
    "llama3_70b": partial(from_scratch, "llama3:70b", 1.5e-4, "full", tensor=8),
    "llama3_405b": partial(from_scratch, "llama3:405b", 8e-5, "full", tensor=8, pipeline=8),
    "qwen3_0.6b": partial(from_scratch, "qwen3:0.6b", 6e-4),
    "qwen3_1.7b": partial(from_scratch, "qwen3:1.7b", 5e-4),
    "qwen3_4b": partial(from_scratch, "qwen3:4b", 4e-4, "selective"),
    "qwen3_8b": partial(from_scratch, "qwen3:8b", 3e-4, "selective"),
    "qwen3_14b": partial(from_scratch, "qwen3:14b", 2e-4, "full"),
    "qwen3_32b": partial(from_scratch, "qwen3:32b", 1.5e-4, "full", tensor=8),
    "qwen3_5_0.8b": partial(from_scratch, "qwen3_5:0.8b", 6e-4),
    "qwen3_5_2b": partial(from_scratch, "qwen3_5:2b", 5e-4),
    "qwen3_5_4b": partial(from_scratch, "qwen3_5:4b", 4e-4, "selective"),
    "qwen3_5_9b": partial(from_scratch, "qwen3_5:9b", 3e-4, "selective"),
}
"""Learning rates of the Llama family are from arXiv 2407.21783, table 3, or interpolated."""


def gsm8k_tiny_pretrain() -> PretrainConfig:
    """A model under 10M parameters learns the form of GSM8K's problems and solutions."""
    return PretrainConfig(
        model="qwen3:tiny",
        template=GSM8K_TEMPLATE,
        tokenizer="bpe:2048",
        steps=300,
        tokens_per_step=8192,
        sequence_length=2048,
        loader=DataConfig(packing="whole"),
        train=TrainConfig(learning_rate=2e-3, warmup_steps=20),
    )


def qwen3_moe_tiny_pretrain() -> PretrainConfig:
    """Like gsm8k_tiny, with a mixture of 16 experts, 4 active per token."""
    config = gsm8k_tiny_pretrain()
    config.model, config.steps = "qwen3_moe:tiny", 200
    config.train.router_auxiliary, config.train.router_z = 0.01, 0.001
    return config


def qwen3_5_tiny_pretrain() -> PretrainConfig:
    """Like gsm8k_tiny, with linear attention in three of four layers."""
    config = gsm8k_tiny_pretrain()
    config.model = "qwen3_5:tiny"
    return config


def chat() -> SFTConfig:
    """Full fine-tuning of a chat model on conversations, in steps of 32,768 tokens."""
    return SFTConfig(
        steps=500,
        tokens_per_step=32768,
        sequence_length=2048,
        train=TrainConfig(learning_rate=1e-5, warmup_steps=20, final_learning_rate_ratio=0.0),
    )


def digit_sum() -> RLConfig:
    """The demo's reinforcement stage: sums of digits."""
    return RLConfig(
        environment="digit_sum",
        steps=120,
        prompts_per_step=32,
        samples_per_prompt=8,
        max_new_tokens=4,
        dtype="float32",
        # Small micro-batches fit a core's cache and need little memory.
        train=TrainConfig(learning_rate=5e-4, warmup_steps=5, schedule="linear", tokens_per_microbatch=1024),
        engine=EngineConfig(max_sequences=256, cache_tokens=16384),
        validation_every=20,
    )


def gsm8k() -> RLConfig:
    """GSM8K with any Llama 3 or Qwen3 folder: correctness 1.0 and format 0.3."""
    return RLConfig(
        environment="gsm8k",
        steps=100,
        prompts_per_step=16,
        samples_per_prompt=8,
        max_new_tokens=256,
        train=TrainConfig(learning_rate=2e-6, warmup_steps=0, schedule="constant"),
        validation_examples=64,
    )


def gsm8k_tiny_rl() -> RLConfig:
    """GRPO on GSM8K with the small model that `pretrain --recipe gsm8k_tiny` trains."""
    return RLConfig(
        environment="gsm8k",
        steps=120,
        prompts_per_step=8,
        samples_per_prompt=8,
        max_new_tokens=80,
        train=TrainConfig(learning_rate=1e-4, warmup_steps=5, schedule="constant"),
        engine=EngineConfig(max_tokens_per_step=4096),
        validation_every=20,
        validation_examples=128,
    )


def qwen3_moe_tiny_rl() -> RLConfig:
    """Like gsm8k_tiny, with the mixture of experts that `pretrain --recipe qwen3_moe_tiny` trains."""
    config = gsm8k_tiny_rl()
    config.train.router_auxiliary = 0.001
    return config


RECIPES: dict[str, dict[str, Callable[[], PretrainConfig] | Callable[[], RLConfig]]] = {
    "pretrain": {
        "tiny": tiny,
        "gsm8k_tiny": gsm8k_tiny_pretrain,
        "qwen3_moe_tiny": qwen3_moe_tiny_pretrain,
        "qwen3_5_tiny": qwen3_5_tiny_pretrain,
        **FROM_SCRATCH,
    },
    "sft": {"chat": chat},
    "dpo": {},
    "reward-model": {},
    "rl": {
        "digit_sum": digit_sum,
        "gsm8k": gsm8k,
        "gsm8k_tiny": gsm8k_tiny_rl,
        "qwen3_moe_tiny": qwen3_moe_tiny_rl,
    },
}


def describe_recipes(command: str) -> str:
    """One line per recipe of a command."""
    lines = []
    width = max(map(len, RECIPES[command]), default=0)
    for name, make in RECIPES[command].items():
        if isinstance(make, partial):
            text = f"{make.args[0]} from scratch, for a cluster; give --data and --tokenizer"
        else:
            text = (make.__doc__ or "").splitlines()[0]
        lines.append(f"  {name:{width}}  {text}")
    return "\n".join(lines)


def recipe(command: str, name: str) -> PretrainConfig | RLConfig:
    """The recipe of a command. Raises UserError, with the closest names, if there is none."""
    known = RECIPES[command]
    if name not in known:
        raise UserError(f'unknown recipe "{name}".{closest(name, known)} For {command}: {", ".join(known)}')
    return known[name]()
