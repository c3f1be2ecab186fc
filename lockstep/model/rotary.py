"""Cosines and sines of the rotary embedding, by position: the same bits on every processor."""

from __future__ import annotations

import decimal
import math

import numpy as np
import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from lockstep import ops
from lockstep.model.config import ModelConfig, RopeScaling, Yarn
from lockstep.ops import native
from lockstep.ops.elementary import cosine_and_sine, logarithm

SMALLEST = 256
"""Positions in the first tables on a CPU."""
CHUNK = 1 << 14
"""Angles computed at a time, so that intermediate values stay in the processor's cache."""


class RotaryTables:
    """Rows of cosines and sines, computed on the CPU on first use and cached on each device.

    On a CPU the tables double in size as needed. On other devices, reading the largest position would synchronize, so
    they start with all of the model's positions, and grow with `reserve`.
    """

    def __init__(self, config: ModelConfig):
        self.config = config
        self._cached: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __call__(
        self, positions: Int[Tensor, "tokens"]
    ) -> tuple[Float[Tensor, "tokens half"], Float[Tensor, "tokens half"]]:
        """Cosine and sine of every position's angles, float32."""
        if native.is_pretending() or positions.device.type == "meta":
            shape = positions.shape[0], self.config.rotary_dim // 2
            return torch.empty(2, *shape, dtype=torch.float32, device=positions.device).unbind()  # type: ignore[return-value]
        length = 0
        if positions.device.type == "cpu" and len(positions) > 0:
            with ops.unrecorded():  # before replaying, the generator compares positions with the tables' length
                length = int(positions.max()) + 1
        cosines, sines = self.reserve(length, positions.device)
        return cosines.index_select(0, positions), sines.index_select(0, positions)

    def reserve(
        self, length: int, device: torch.device
    ) -> tuple[Float[Tensor, "positions half"], Float[Tensor, "positions half"]]:
        """The tables on `device`, of at least `length` positions."""
        cached = self._cached.get(device)
        if cached is None or len(cached[0]) < length:
            smallest = SMALLEST if device.type == "cpu" else self.config.max_positions
            length = max(smallest, 1 << max(length - 1, 0).bit_length())
            tables = rotary_tables(rotary_frequencies(self.config), length, table_factor(self.config))
            cached = self._cached[device] = tables[0].to(device), tables[1].to(device)
        return cached


def rotary_tables(
    frequencies: Float32[np.ndarray, "half"], length: int, factor: float = 1.0
) -> tuple[Float[Tensor, "length half"], Float[Tensor, "length half"]]:
    """Cosine and sine of the float32 product of each position below `length` with each frequency, float32.

    factor: of both, with another rounding.
    """
    cosines, sines = (np.empty((length, len(frequencies)), dtype=np.float32) for _ in range(2))
    step = max(1, CHUNK // len(frequencies))
    for start in range(0, length, step):
        rows = slice(start, min(start + step, length))
        angles = np.arange(rows.start, rows.stop, dtype=np.float32)[:, None] * frequencies
        cosines[rows], sines[rows] = cosine_and_sine(angles.astype(np.float64))
    if factor != 1.0:
        cosines *= np.float32(factor)
        sines *= np.float32(factor)
    return torch.from_numpy(cosines), torch.from_numpy(sines)


def rotary_frequencies(config: ModelConfig) -> Float32[np.ndarray, "half"]:
    """Radians per position for each pair of a head's dimensions: powers in software, rounded to float32 as usual."""
    exponents = np.arange(0, config.rotary_dim, 2, dtype=np.float32) / np.float32(config.rotary_dim)
    with decimal.localcontext(decimal.Context(prec=40)):
        theta = decimal.Decimal(config.rope_theta)
        powers = np.array([float(theta ** decimal.Decimal(float(e))) for e in exponents], dtype=np.float32)
    if isinstance(config.rope_scaling, Yarn):
        return stretched_by_yarn(powers, config.rope_theta, config.rope_scaling)
    frequencies: np.ndarray = np.float32(1.0) / powers
    return frequencies if config.rope_scaling is None else _stretched(frequencies, config.rope_scaling)


def table_factor(config: ModelConfig) -> float:
    """The factor of cosines and sines: YaRN's attention factor, else 1."""
    scaling = config.rope_scaling
    if not isinstance(scaling, Yarn):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _temperature(scaling.factor, scaling.mscale) / _temperature(scaling.factor, scaling.mscale_all_dim)
    return _temperature(scaling.factor, 1.0)


def softmax_scale(config: ModelConfig) -> float:
    """The factor of latent attention's scores: 1/√width of a query, times YaRN's factor for `mscale_all_dim`."""
    assert config.latent is not None
    scale: float = (config.latent.nope_dim + config.latent.rope_dim) ** -0.5
    scaling = config.rope_scaling
    if isinstance(scaling, Yarn) and scaling.mscale_all_dim:
        scale *= _temperature(scaling.factor, scaling.mscale_all_dim) ** 2
    return scale


def _temperature(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * _log(factor) + 1.0


def _log(x: float) -> float:
    return float(logarithm(np.array([x], dtype=np.float64))[0])


def _stretched(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Llama 3.1: slow frequencies are divided by `factor`, fast ones unchanged, those in between interpolated."""
    factor, low, high, positions, turn = map(
        np.float32,
        (
            scaling.factor,
            scaling.low_freq_factor,
            scaling.high_freq_factor,
            scaling.original_max_positions,
            2 * math.pi,
        ),
    )
    turns = positions / (turn / frequencies)
    unchanged = np.clip((turns - low) / (high - low), np.float32(0), np.float32(1))
    return (np.float32(1) - unchanged) * frequencies / factor + unchanged * frequencies


def stretched_by_yarn(powers: Float32[np.ndarray, "half"], theta: float, scaling: Yarn) -> Float32[np.ndarray, "half"]:
    """YaRN: pairs of dimensions below `low` keep their frequency, from `high` on it is divided by `factor`.

    powers: of `theta`, the reciprocals of the unscaled frequencies.
    """
    dim = 2 * len(powers)

    def pair_that_turns(turns: float) -> float:
        return dim * _log(scaling.original_max_positions / (turns * 2 * math.pi)) / (2 * _log(theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    one = np.float32(1)
    pairs = np.arange(len(powers), dtype=np.float32)
    unchanged = one - np.clip((pairs - np.float32(low)) / np.float32(high - low), np.float32(0), one)
    slow: np.ndarray = one / (np.float32(scaling.factor) * powers) * (one - unchanged)
    return slow + one / powers * unchanged
