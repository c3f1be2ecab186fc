"""Fresh weights, drawn so that every layout gets the same model and each rank draws little more than its shard.

Draws have the same bits on every processor: Philox (Salmon et al., 2011) generates integers; the inverse of the normal
distribution, PPND7 of Wichura (1988, AS 241) in float32, maps them to draws. Its logarithm is `ops.elementary`'s, and
every operation is rounded separately.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from lockstep.errors import UserError
from lockstep.model.config import ModelConfig
from lockstep.model.decoder import Decoder
from lockstep.model.device import checked_device
from lockstep.model.dtypes import resolve_dtype
from lockstep.model.protocols import TrainableModel
from lockstep.model.shard import local_part
from lockstep.model.stored import is_adapter, is_score_head
from lockstep.ops.elementary import logarithm, polynomial

BLOCK = 1 << 16
"""Elements drawn from one seed, in whole rows: the smallest piece of a parameter that can be drawn separately."""

RATES = 0.01, 16.0
"""The least and the greatest rate of decay of a fresh delta network."""
CENTRE = (3.3871327179e00, 5.0434271938e01, 1.5929113202e02, 5.9109374720e01)
CENTRE_BELOW = (1.0, 1.7895169469e01, 7.8757757664e01, 6.7187563600e01)
TAIL = (1.4234372777e00, 2.7568153900e00, 1.3067284816e00, 1.7023821103e-01)
TAIL_BELOW = (1.0, 7.3700164250e-01, 1.2021132975e-01)


def build_model(
    config: ModelConfig, dtype: str | torch.dtype = "bfloat16", device: str | torch.device = "cpu", seed: int = 0
) -> Decoder:
    """Fresh weights: normal(0, 0.02), scaled by 1/√(2·layers) in projections into the residual stream; norms'
    factors 1, biases and sinks 0; of delta networks, see `_begin_recurrence`.

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
        local, place = local_part(parameter)
        if ".linear_attn." in name and _begin_recurrence(name, local, place, seed):
            continue
        if parameter.ndim == 1 or name.endswith("_bias"):
            of_norm = 0.0 if model.config.norm_offset else 1.0
            parameter.fill_(of_norm if name.endswith(".weight") else 0.0)
            continue
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


def _begin_recurrence(name: str, local: Tensor, place: tuple[slice, ...], seed: int) -> bool:
    """Initializes a parameter of a delta network other than its projections; False for these.

    As in transformers, rates are uniform between `RATES`, step biases and the norm's factors 1. The convolution
    is uniform between ±1/√width, as PyTorch begins one: with the deviation of 0.02 of the other weights, outputs would
    be so small that the epsilon of the norm after them weakens them.
    """
    if name.endswith((".dt_bias", ".norm.weight")):
        local.fill_(1.0)
    elif name.endswith(".conv1d.weight"):
        width = local.shape[-1]
        _draw(local[:, 0], (place[0], place[2]), width, 2 / math.sqrt(width), f"{seed}/{name}", uniform)
    elif name.endswith(".A_log"):
        rates = torch.empty(len(local), 1, dtype=torch.float64)
        _draw(rates, (place[0], slice(0, 1)), 1, RATES[1] - RATES[0], f"{seed}/{name}", uniform)
        local.copy_(torch.from_numpy(logarithm(rates[:, 0].numpy() + sum(RATES) / 2)))
    else:
        return False
    return True


def _begin_adapter(name: str, parameter: Tensor, seed: int) -> None:
    local, place = local_part(parameter)
    local.zero_()
    if ".lora_A." in name:
        inputs = parameter.shape[1]
        _draw(local, place, inputs, 2 / math.sqrt(inputs), f"{seed}/{name}", uniform)


def _standard_deviation(name: str, config: ModelConfig) -> float:
    if is_score_head(name):
        return 1 / math.sqrt(config.dim + 1)
    into_residual = name.removesuffix(".weight").endswith(("o_proj", "out_proj", "down_proj"))
    return 0.02 / math.sqrt(2 * config.num_layers) if into_residual else 0.02


def normal(seed: int, count: int) -> Float32[np.ndarray, "count"]:
    """`count` draws of mean 0 and standard deviation 1, within ±5.3; the first draws do not depend on `count`."""
    return inverse_normal(uniform(seed, count))


def uniform(seed: int, count: int) -> Float32[np.ndarray, "count"]:
    """`count` draws strictly between -1/2 and 1/2; the first draws do not depend on `count`."""
    words = np.random.Philox(key=seed).random_raw((count + 1) // 2).astype("<u8", copy=False).view("<u4")[:count]
    # Odd 24-bit integers around zero: exact in float32, and never probability 0 or 1.
    distances = ((words >> np.uint32(8)) | np.uint32(1)).astype(np.int32) - np.int32(1 << 23)
    return distances.astype(np.float32) * np.float32(2.0**-24)


def inverse_normal(distance: Float32[np.ndarray, "count"]) -> Float32[np.ndarray, "count"]:
    """The quantile of the normal distribution at probability 1/2 + `distance`, to 7 digits."""
    r = np.float32(0.180625) - distance * distance
    values = distance * (polynomial(r, CENTRE) / polynomial(r, CENTRE_BELOW))
    (tails,) = np.nonzero(np.abs(distance) > np.float32(0.425))
    far = distance[tails]
    roots = np.sqrt(-logarithm(0.5 - np.abs(far).astype(np.float64))).astype(np.float32) - np.float32(1.6)
    values[tails] = np.copysign(polynomial(roots, TAIL) / polynomial(roots, TAIL_BELOW), far)
    return values


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
