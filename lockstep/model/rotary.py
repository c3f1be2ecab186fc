"""Cosines and sines of the rotary embedding, by position: the same bits on every processor."""

from __future__ import annotations

import decimal
import math
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from lockstep import ops
from lockstep.model.config import ModelConfig
from lockstep.model.ropes import LinearRope, LongQueries, LongRope, Rope, RopeScale, RopeScaling, Yarn
from lockstep.ops import native
from lockstep.ops.elementary import cosine_and_sine, logarithm

SMALLEST = 256
"""Positions in the first tables on a CPU."""
CHUNK = 1 << 14
"""Angles computed at a time, so that intermediate values stay in the processor's cache."""


Tables = tuple[Float[Tensor, "positions *kinds half"], Float[Tensor, "positions *kinds half"]]
"""Cosines and sines by position; with `long_queries`, those for keys and those for queries."""


class RotaryTables:
    """Rows of cosines and sines of each of the model's rotary embeddings, computed on the CPU on first use and cached
    on each device.

    On a CPU the tables double in size as needed. On other devices, reading the largest position would synchronize, so
    they start with all of the model's positions, and grow with `reserve`.
    """

    def __init__(self, config: ModelConfig):
        self.config = config
        self._cached: dict[torch.device, list[Tables]] = {}

    def __call__(self, positions: Int[Tensor, "tokens"]) -> list[Tables]:
        """Cosine and sine of every position's angles, float32, for each of `ModelConfig.ropes`."""
        if native.is_pretending() or positions.device.type == "meta":
            kinds = (2,) if self.config.long_queries else ()
            shape = positions.shape[0], *kinds, self.config.rotary_dim // 2
            empty = partial(torch.empty, shape, dtype=torch.float32, device=positions.device)
            return [(empty(), empty()) for _ in self.config.ropes]
        length = 0
        if positions.device.type == "cpu" and len(positions) > 0:
            with ops.unrecorded():  # before replaying, the generator compares positions with the tables' length
                length = int(positions.max()) + 1
        tables = self.reserve(length, positions.device)
        return [(cos.index_select(0, positions), sin.index_select(0, positions)) for cos, sin in tables]

    def reserve(self, length: int, device: torch.device) -> list[Tables]:
        """The tables on `device`, of at least `length` positions."""
        cached = self._cached.get(device)
        if cached is None or len(cached[0][0]) < length:
            smallest = SMALLEST if device.type == "cpu" else self.config.max_positions
            length = max(smallest, 1 << max(length - 1, 0).bit_length())
            tables = [self._of(rope, length) for rope in self.config.ropes]
            cached = self._cached[device] = [(cos.to(device), sin.to(device)) for cos, sin in tables]
        return cached

    def _of(self, rope: Rope, length: int) -> Tables:
        frequencies = rotary_frequencies(self.config, rope)
        cosines, sines = rotary_tables(frequencies, length, table_factor(rope.scaling))
        if (growth := self.config.long_queries) is None:
            return cosines, sines
        factors = query_factors(growth, length)
        return torch.stack((cosines, cosines * factors), 1), torch.stack((sines, sines * factors), 1)


def query_factors(growth: LongQueries, length: int) -> Float32[Tensor, "length 1"]:
    """The factor of the query at each position below `length`."""
    times = np.arange(length, dtype=np.float64) // growth.original_max_positions
    return torch.from_numpy(1.0 + growth.beta * logarithm(1.0 + times)).float()[:, None]


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


def rotary_frequencies(config: ModelConfig, rope: Rope | None = None) -> Float32[np.ndarray, "half"]:
    """Radians per position for each pair of a head's dimensions: powers in software, rounded to float32 as usual.

    rope: one of the model's rotary embeddings, by default the first.
    """
    rope = rope or config.ropes[0]
    exponents = np.arange(0, config.rotary_dim, 2, dtype=np.float32) / np.float32(config.rotary_dim)
    with decimal.localcontext(decimal.Context(prec=40)):
        theta = decimal.Decimal(rope.theta)
        powers = np.array([float(theta ** decimal.Decimal(float(e))) for e in exponents], dtype=np.float32)
    one = np.float32(1)
    match rope.scaling:
        case Yarn():
            return stretched_by_yarn(powers, rope.theta, rope.scaling)
        case RopeScaling():
            return _stretched(one / powers, rope.scaling)
        case LongRope(short, long, original):
            divisors = np.array(long if config.max_positions > original else short, dtype=np.float32)
            return one / (divisors * powers)
        case LinearRope(factor):
            return one / powers / np.float32(factor)
    return one / powers  # of DynamicRope too: see there


def table_factor(scaling: RopeScale | None) -> float:
    """The factor of cosines and sines: the attention factor of YaRN and LongRope, else 1."""
    if isinstance(scaling, LongRope):
        return scaling.attention_factor
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
