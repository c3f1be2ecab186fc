"""The order of sums in a backward pass: that of the layout, or that of one process (`train.deterministic_layout`).

Two kinds of sums run over parts on several ranks. Over a product's outputs, for the gradient of its input: with
`chunks`, each part of the outputs is summed separately, and the parts are joined in a binary tree. Over tokens, for the
gradient of a weight: ranks that share the tokens exchange them for outputs, so that every element is one sum over all
tokens, computed on one rank, and zero on the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class GatheredRows(Protocol):
    """Rows of which each of several ranks has some, and which can be gathered on all."""

    is_first: bool
    """Whether this rank computes what only one rank should compute."""

    def gather(self, own: Tensor) -> Tensor:
        """All ranks' rows, in the order of one process; without gradient."""
        ...


@runtime_checkable
class SharedRows(GatheredRows, Protocol):
    """Tokens, or a loss's targets, shared by several ranks."""

    def whole(self, own: Tensor) -> Tensor:
        """`gather` with a gradient: that of this rank's rows."""
        ...

    def own_of(self, whole: Tensor) -> Tensor:
        """This rank's rows of `whole`, in its order."""
        ...

    def part(self, count: int) -> slice:
        """The outputs, out of `count`, that this rank computes."""
        ...


# Plain globals: a backward pass may run in a different thread than the forward.
_chunks = 0
_tokens: SharedRows | None = None
_targets: SharedRows | None = None


@contextmanager
def one_order(chunks: int) -> Iterator[None]:
    """Within this context, gradients are summed in one order. `chunks`: those of the model's row products."""
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
    """The number of parts of a column product's outputs over which the gradient of its input is summed."""
    return max(_chunks, 1)


def share(tokens: SharedRows | None, targets: SharedRows | None) -> None:
    """From now on, until the micro-batch's backward is over, other ranks have some of its tokens and targets."""
    global _tokens, _targets
    _tokens, _targets = tokens, targets


def shared_tokens() -> SharedRows | None:
    """The sharing of the rows that run through the model; None if this rank has all, or without one order."""
    return _tokens if is_asked() else None


def shared_targets() -> SharedRows | None:
    """The sharing of the rows that the loss is computed from; as `shared_tokens`."""
    return _targets if is_asked() else None
