"""The adapter that a run's settings ask for."""

from __future__ import annotations

from dataclasses import replace

from lockstep.config import LoraConfig
from lockstep.errors import UserError
from lockstep.model import ModelConfig, lora_of


def adapted(shape: ModelConfig, lora: LoraConfig, model: str) -> ModelConfig:
    """The shape of `model` with a fresh adapter. Raises UserError where it cannot have that, or has one already."""
    if shape.lora is not None:
        raise UserError(
            f"{model}: is an adapter of rank {shape.lora.rank} already, which a run trains on without lora.rank; leave "
            "that out, or merge the adapter first: lockstep convert --merge"
        )
    return replace(shape, lora=lora_of(shape, lora.rank, lora.alpha, lora.targets))
