"""The fixed pieces in which a vocabulary is reduced: a sharded head gives the same bits as a whole one."""

from __future__ import annotations

from functools import cache

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
