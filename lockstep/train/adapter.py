"""The adapter that a run's settings ask for."""

from __future__ import annotations

from dataclasses import replace

from lockstep.config import LoraConfig
from lockstep.errors import UserError
from lockstep.model import ModelConfig, lora_of


def adapted(shape: ModelConfig, lora: LoraConfig, model: str) -> ModelConfig:
    """The shape of `model` with a fresh adapter. Raises UserError if it cannot have one, or already has one."""
    if shape.lora is not None:
        raise UserError(
            f"{model}: is already an adapter of rank {shape.lora.rank}; remove lora.rank to continue training it, or "
            "merge the adapter first: lockstep convert --merge"
        )
    return replace(shape, lora=lora_of(shape, lora.rank, lora.alpha, lora.targets))
