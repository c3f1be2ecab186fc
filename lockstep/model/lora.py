"""Low-rank adapters (LoRA, arXiv 2106.09685) for the frozen weights of a decoder.

The adapter is part of the one forward (`layers.Projection`): trainer and generator compute it with the same operators
in the same order, unmerged, so their bits agree as they do without one. With the adapter off, the model is its base.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import nn

from lockstep.errors import UserError
from lockstep.model.config import Lora, ModelConfig
from lockstep.model.layers import Projection, Weight
from lockstep.model.stored import is_score_head

if TYPE_CHECKING:
    from lockstep.model.decoder import Decoder


def add_adapter(model: nn.Module, lora: Lora, dtype: torch.dtype, device: str | torch.device) -> None:
    """Adds the weights of an adapter, without values, to the layers that it adapts, and freezes all others.

    The head of a reward model is trained as well. Raises UserError for a layer that does not exist, and for a rank
    larger than a layer's matrix.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_score_head(name))
    layers = dict(projections(model))
    for name in lora.modules:
        if name not in layers:
            raise UserError(f"the adapter is for a layer {name}, which this model does not have; give its own base")
        layer = layers[name]
        outputs, inputs = layer.weight.shape
        _refuse_rank(lora.rank, name, layer)
        layer.lora_A = Weight(lora.rank, inputs, dtype=dtype, device=device)
        layer.lora_B = Weight(outputs, lora.rank, dtype=dtype, device=device)
        layer.scaling, layer.adapted = lora.scaling, True


def lora_of(shape: ModelConfig, rank: int, alpha: float, targets: Sequence[str]) -> Lora:
    """The adapter for a model of this shape, for the layers that `targets` name or match as patterns.

    Raises UserError for a target that matches nothing, and for a rank larger than a matrix.
    """
    from lockstep.model.decoder import Decoder

    layers = dict(projections(Decoder(shape, torch.float32, "meta")))
    chosen = set[str]()
    for target in targets:
        matching = {name for name in layers if fnmatchcase(name, target) or fnmatchcase(name, f"*.{target}")}
        if not matching:
            kinds = sorted({name.rpartition(".")[2] for name in layers})
            raise UserError(
                f'lora.targets "{target}" matches no linear layer; the layers are {", ".join(kinds)}, with names such '
                f"as {next(iter(layers))} (the head, routers and stacked experts have no adapters)"
            )
        chosen |= matching
    if not chosen:
        raise UserError("lora.targets is empty; name the layers to adapt, such as *_proj")
    for name in chosen:
        _refuse_rank(rank, name, layers[name])
    return Lora(rank, float(alpha), tuple(name for name in layers if name in chosen))


def projections(model: nn.Module) -> Iterator[tuple[str, Projection]]:
    """The layers that can have an adapter, by name."""
    for name, module in model.named_modules():
        if isinstance(module, Projection):
            yield name, module


@contextmanager
def adapter_off(model: Decoder) -> Iterator[None]:
    """Within it the model is its base. Its layers run uncompiled: compiled ones include the adapter's update."""
    from lockstep.model.decoder import Block

    adapted = [layer for _, layer in projections(model) if layer.adapted]
    halves, model.halves = model.halves, Block
    try:
        for layer in adapted:
            layer.adapted = False
        yield
    finally:
        for layer in adapted:
            layer.adapted = True
        model.halves = halves


def _refuse_rank(rank: int, name: str, layer: Projection) -> None:
    outputs, inputs = layer.weight.shape
    if not 1 <= rank <= min(outputs, inputs):
        raise UserError(
            f"lora.rank is {rank}, but {name} is {outputs} x {inputs}; give 1 to {min(outputs, inputs)}, or leave the "
            "layer out of lora.targets"
        )
