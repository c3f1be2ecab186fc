"""The fixed pieces in which a vocabulary is reduced, and the part of it that a process has.

A sharded head gives the same bits as a whole one.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

SHARDS = (2, 4, 8)
"""Numbers of ranks that a head can be sharded over."""
PIECES = 16
"""Most pieces of a vocabulary: splitting it for every number of ranks in `SHARDS` gives no more."""
CPU = torch.device("cpu")


def piece_bounds(vocab: int, device: torch.device = CPU, first: int = 0, stop: int | None = None) -> Tensor:
    """The starts of a vocabulary's pieces and the end of the last, int64; only those in its part `first` to `stop`.

    It is split wherever any number of ranks in `SHARDS` splits it into parts of equal length, the last of which may be
    shorter: into 8 pieces if 8 divides the vocabulary, otherwise a few more.
    """
    stop = vocab if stop is None else stop
    cuts = {min(vocab, part * -(-vocab // ranks)) for ranks in SHARDS for part in range(ranks + 1)}
    bounds = tuple(bound - first for bound in sorted(cuts) if first <= bound <= stop)
    # Cached for other devices, to which each step would copy it, but not on the CPU, where tracing would cache a fake.
    return torch.tensor(bounds) if device.type == "cpu" else _on_device(bounds, device)


@cache
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, device=device)


@runtime_checkable
class VocabularyPart(Protocol):
    """Tokens `first` to `stop` of `vocab`: part number `rank` of ascending parts on several processes."""

    vocab: int
    first: int
    stop: int
    rank: int

    def gather(self, local: Tensor) -> Tensor:
        """The tensors of all processes, by rank: `[parts, *shape]`."""

    def gather_masses(self, local: Tensor) -> Tensor:
        """The masses `[rows, pieces, 3]` of the whole vocabulary, gathered from all parts."""

    def drawn(self, tokens: Tensor, scaled: Tensor) -> tuple[Tensor, Tensor]:
        """For each row, the token id and its logit, from the one process whose token is not negative."""


class Whole:
    """The whole vocabulary, in one process."""

    first, rank = 0, 0

    def __init__(self, vocab: int):
        self.vocab = self.stop = vocab

    def gather(self, local: Tensor) -> Tensor:
        return local[None]

    def gather_masses(self, local: Tensor) -> Tensor:
        return local

    def drawn(self, tokens: Tensor, scaled: Tensor) -> tuple[Tensor, Tensor]:
        return tokens, scaled


def local_piece_bounds(part: VocabularyPart, device: torch.device) -> Tensor:
    """The bounds of the vocabulary's pieces in this part."""
    return piece_bounds(part.vocab, device, part.first, part.stop)
