"""Selects the layers of a low-rank adapter (LoRA), and switches a model's adapter off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase

import torch

from lockstep.errors import UserError
from lockstep.model.config import Lora, ModelConfig
from lockstep.model.decoder import Block, Decoder
from lockstep.model.layers import adaptable, refuse_rank


def lora_of(shape: ModelConfig, rank: int, alpha: float, targets: Sequence[str]) -> Lora:
    """The adapter for a model of this shape, for the layers that match `targets`: names, last names or patterns.

    Raises UserError for a target that matches nothing, and for a rank larger than a matrix.
    """
    layers = dict(adaptable(Decoder(shape, torch.float32, "meta")))
    chosen = set[str]()
    for target in targets:
        matching = {name for name in layers if fnmatchcase(name, target) or fnmatchcase(name, f"*.{target}")}
        if not matching:
            kinds = sorted({name.rpartition(".")[2] for name in layers})
            raise UserError(
                f'lora.targets "{target}" matches no linear layer; the layers are {", ".join(kinds)}, with names such '
                f"as {next(iter(layers))} (a reward model's head, routers and stacked experts have no adapters)"
            )
        chosen |= matching
    if not chosen:
        raise UserError("lora.targets is empty; name the layers to adapt, such as *_proj*")
    for name in chosen:
        refuse_rank(rank, name, layers[name])
    return Lora(rank, float(alpha), tuple(name for name in layers if name in chosen))


@contextmanager
def adapter_off(model: Decoder) -> Iterator[None]:
    """In this context the model is its base. Its layers run uncompiled: compiled ones include the adapter's update."""
    adapted = [layer for _, layer in adaptable(model) if layer.adapted]
    halves, model.halves = model.halves, Block
    try:
        for layer in adapted:
            layer.adapted = False
        yield
    finally:
        for layer in adapted:
            layer.adapted = True
        model.halves = halves
