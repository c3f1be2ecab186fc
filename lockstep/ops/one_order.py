"""The order of sums in a backward pass: as a layout makes them, or as one process does (`train.deterministic_layout`).

Two kinds of sum go through parts that ranks hold. Over a product's outputs, for the gradient of its input: with
`chunks` each part of the outputs is summed by itself, and the parts meet in a binary tree. Over tokens, for the
gradient of a weight: ranks that share the tokens trade them for outputs, so that every element is one sum over all
tokens, made on one rank, and zero on the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class GatheredRows(Protocol):
    """Rows of which each of several ranks has some, and all may have all."""

    is_first: bool
    """Whether this rank makes what only one has to make."""

    def gather(self, own: Tensor) -> Tensor:
        """All ranks' rows, in the order that one process has them in; without gradient."""
        ...


@runtime_checkable
class SharedRows(GatheredRows, Protocol):
    """Tokens, or a loss's targets, of which each of several ranks has some."""

    def whole(self, own: Tensor) -> Tensor:
        """`gather` with a gradient: that of this rank's rows."""
        ...

    def part(self, count: int) -> slice:
        """Of `count` outputs those that this rank makes."""
        ...


# Plain globals: a backward pass may run in another thread than the forward.
_chunks = 0
_tokens: SharedRows | None = None
_targets: SharedRows | None = None


@contextmanager
def one_order(chunks: int) -> Iterator[None]:
    """Within it, gradients are summed in the one order. `chunks`: those of the model's row products."""
    global _chunks
    before, _chunks = _chunks, chunks
    try:
        yield
    finally:
        _chunks = before
        share(None, None)


def is_asked() -> bool:
    return _chunks > 0


def gradient_chunks() -> int:
    """Parts of a column product's outputs, over which the gradient of its input is summed."""
    return max(_chunks, 1)


def share(tokens: SharedRows | None, targets: SharedRows | None) -> None:
    """From here on, until the micro-batch's backward is over, other ranks have some of its tokens and targets."""
    global _tokens, _targets
    _tokens, _targets = tokens, targets


def shared_tokens() -> SharedRows | None:
    """Who has the rest of the rows that run through the model; None where they are all here, or in no one order."""
    return _tokens if is_asked() else None


def shared_targets() -> SharedRows | None:
    """Who has the rest of the rows that the loss is computed of; as `shared_tokens`."""
    return _targets if is_asked() else None
