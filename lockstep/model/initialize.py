"""Fresh weights, drawn so that every layout gets the same model and each rank draws little more than its shard."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.model.config import ModelConfig
from lockstep.model.decoder import Decoder
from lockstep.model.device import checked_device
from lockstep.model.dtypes import resolve_dtype
from lockstep.model.normal import normal, uniform
from lockstep.model.protocols import TrainableModel
from lockstep.model.shard import local_part
from lockstep.model.stored import is_adapter, is_score_head

BLOCK = 1 << 16
"""Elements drawn from one seed, in whole rows: the smallest piece of a parameter that can be drawn separately."""


def build_model(
    config: ModelConfig, dtype: str | torch.dtype = "bfloat16", device: str | torch.device = "cpu", seed: int = 0
) -> Decoder:
    """Fresh weights: normal(0, 0.02), scaled by 1/√(2·layers) in projections into the residual stream; norms 1, biases
    and sinks 0.

    Draws are float32, so a seed gives the same weights, rounded, in every dtype and on every processor. On the `meta`
    device nothing is allocated. Raises UserError if `config` is not a ModelConfig, and for a device that this machine
    lacks.
    """
    if not isinstance(config, ModelConfig):
        raise UserError(f'config is {config!r:.60}; give a ModelConfig, such as preset("qwen3:micro")')
    device = checked_device(device)
    model = Decoder(config, resolve_dtype(dtype), device)
    if device.type != "meta":
        initialize(model, seed)
    return model


def initialize(model: TrainableModel, seed: int) -> None:
    """Initializes the weights of a Decoder, or of part of one, in place; of a sharded parameter, this rank's shard."""
    initialize_some(model, seed, lambda name: True)


@torch.no_grad()
def initialize_some(model: TrainableModel, seed: int, wanted: Callable[[str], bool]) -> None:
    """`initialize` only the parameters whose names are `wanted`. An adapter's A is uniform between ±1/√in, as in
    `peft`, and its B zeros; a score head is normal(0, 1/(dim + 1)) (arXiv 2009.01325, appendix B)."""
    for name, parameter in model.named_parameters():
        if not wanted(name):
            continue
        if parameter.ndim == 1 or name.endswith("_bias"):
            parameter.fill_(1.0 if name.endswith(".weight") else 0.0)
            continue
        local, place = local_part(parameter)
        if is_adapter(name):
            _begin_adapter(name, parameter, seed)
            continue
        deviation, key = _standard_deviation(name, model.config), f"{seed}/{name}"
        if parameter.ndim == 2:
            _draw(local, place, parameter.shape[1], deviation, key)
            continue
        for expert in range(place[0].start, place[0].stop):
            values = local[expert - place[0].start]
            _draw(values, place[1:], parameter.shape[2], deviation, f"{key}/{expert}")


def _begin_adapter(name: str, parameter: Tensor, seed: int) -> None:
    local, place = local_part(parameter)
    local.zero_()
    if ".lora_A." in name:
        inputs = parameter.shape[1]
        _draw(local, place, inputs, 2 / math.sqrt(inputs), f"{seed}/{name}", uniform)


def _standard_deviation(name: str, config: ModelConfig) -> float:
    if is_score_head(name):
        return 1 / math.sqrt(config.dim + 1)
    into_residual = name.removesuffix(".weight").endswith(("o_proj", "down_proj"))
    return 0.02 / math.sqrt(2 * config.num_layers) if into_residual else 0.02


def _draw(
    out: Tensor,
    place: tuple[slice, ...],
    columns: int,
    deviation: float,
    key: str,
    draw: Callable[[int, int], np.ndarray] = normal,
) -> None:
    rows, cut = place[0], place[1]
    height = max(1, BLOCK // columns)
    for block in range(rows.start // height, -(-rows.stop // height)):
        seed = int.from_bytes(hashlib.blake2b(f"{key}/{block}".encode(), digest_size=8).digest(), "little")
        drawn = torch.from_numpy(draw(seed, height * columns)).view(height, columns)
        start, stop = max(rows.start, block * height), min(rows.stop, (block + 1) * height)
        part = drawn[start - block * height : stop - block * height, cut]
        out[start - rows.start : stop - rows.start].copy_(part * deviation)
