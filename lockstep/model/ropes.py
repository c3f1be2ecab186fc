"""Rotary embeddings: the base of their frequencies, and how these are scaled for longer texts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.x's stretching of the slow rotary frequencies to longer contexts."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class Yarn:
    """YaRN's stretching of the slow rotary frequencies to longer contexts (arXiv 2309.00071)."""

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    """Frequencies with at least this many turns within the original context are unchanged."""
    beta_slow: float = 1.0
    """Frequencies with at most this many turns are divided by `factor`; those in between are interpolated."""
    truncate: bool = True
    """Whether the interpolated frequencies begin and end at whole pairs of dimensions."""
    attention_factor: float | None = None
    """Factor of cosines and sines; by default 0.1·ln(factor) + 1, or computed from the two fields below."""
    mscale: float | None = None
    mscale_all_dim: float | None = None


@dataclass(frozen=True)
class LinearRope:
    """All rotary frequencies divided by one factor; a negative one turns the other way (nanochat)."""

    factor: float


@dataclass(frozen=True)
class DynamicRope:
    """Frequencies that shrink beyond the model's positions. Up to them, which is as far as Lockstep goes, they are the
    unscaled ones: further on, a token's keys would depend on how many tokens follow."""

    factor: float


@dataclass(frozen=True)
class LongRope:
    """A divisor for each rotary frequency (arXiv 2402.13753): the long ones if the model's `max_positions` exceed the
    original ones, else the short ones. transformers chooses by the length of each text."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_positions: int
    attention_factor: float
    """Factor of cosines and sines."""


RopeScale = RopeScaling | Yarn | LinearRope | DynamicRope | LongRope


@dataclass(frozen=True)
class Rope:
    """A rotary embedding: the base of its frequencies, and their scaling."""

    theta: float
    scaling: RopeScale | None = None


@dataclass(frozen=True)
class LongQueries:
    """Queries grow with their position (Llama 4): by 1 + beta · ln(1 + ⌊position / original_max_positions⌋)."""

    beta: float
    original_max_positions: int
