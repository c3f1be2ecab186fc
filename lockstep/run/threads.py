"""How many threads are worth using for a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lockstep.model import ModelConfig
from lockstep.observe.machine import busy_neighbours

WORTH_SHARING = 2**27
"""Multiplications in a run's largest product from which a second thread pays off: 2 to 5 ms of one thread."""


def is_small(config: ModelConfig, tokens: int) -> bool:
    """Whether no product of a micro-batch of `tokens` tokens is worth sharing between threads."""
    widest = max(config.intermediate_size, config.attended_features, config.vocab_size)
    return tokens * config.dim * widest < WORTH_SHARING


@contextmanager
def fitting_threads(config: ModelConfig, tokens: int) -> Iterator[int]:
    """Uses one thread for a small run on a busy machine, else all there are; yields their number.

    Threads meet at a barrier after every operator. If another process takes one thread's core, the others wait until it
    is scheduled again, some milliseconds: as long as a small run's operators take. Results do not depend on this.
    """
    before = torch.get_num_threads()
    alone = before > 1 and is_small(config, tokens) and busy_neighbours() > 0
    if alone:
        torch.set_num_threads(1)
    try:
        yield torch.get_num_threads()
    finally:
        if alone:
            torch.set_num_threads(before)
