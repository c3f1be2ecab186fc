"""The weights of a low-rank adapter (LoRA, arXiv 2106.09685) in the layers of a decoder.

The adapter is part of the one forward (`layers.Projection`): trainer and generator compute it with the same operators
in the same order, unmerged, so their bits agree. With the adapter off, the model is its base.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from lockstep.errors import UserError
from lockstep.model.config import Lora
from lockstep.model.layers import Projection, Weight
from lockstep.model.stored import is_score_head


def add_adapter(model: nn.Module, lora: Lora, dtype: torch.dtype, device: str | torch.device) -> None:
    """Adds the uninitialized weights of an adapter to its layers, and freezes all others but a reward model's head.

    Raises UserError for a layer that does not exist, and for a rank larger than a layer's matrix.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_score_head(name))
    layers = dict(projections(model))
    for name in lora.modules:
        if name not in layers:
            raise UserError(f"the adapter is for a layer {name}, which this model does not have; give its own base")
        layer = layers[name]
        outputs, inputs = layer.weight.shape
        refuse_rank(lora.rank, name, layer)
        layer.lora_A = Weight(lora.rank, inputs, dtype=dtype, device=device)
        layer.lora_B = Weight(outputs, lora.rank, dtype=dtype, device=device)
        layer.scaling, layer.adapted = lora.scaling, True


def projections(model: nn.Module) -> Iterator[tuple[str, Projection]]:
    """The layers that can have an adapter, by name."""
    for name, module in model.named_modules():
        if isinstance(module, Projection):
            yield name, module


def refuse_rank(rank: int, name: str, layer: Projection) -> None:
    """Raises UserError for a rank larger than the layer's matrix."""
    outputs, inputs = layer.weight.shape
    if not 1 <= rank <= min(outputs, inputs):
        raise UserError(
            f"lora.rank is {rank}, but {name} is {outputs} x {inputs}; give 1 to {min(outputs, inputs)}, or leave the "
            "layer out of lora.targets"
        )
