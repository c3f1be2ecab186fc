"""The order of sums in a backward pass: the layout's, or with one order that of one process
(`train.deterministic_layout`).

Two kinds of sums run over parts on several ranks. Over a product's outputs, for the gradient of its input: with
`chunks`, each part of the outputs is summed separately, and the parts are joined in a binary tree. Over tokens, for the
gradient of a weight: ranks that share the tokens exchange them for outputs, so that every element is one sum over all
tokens, computed on one rank, and zero on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar, runtime_checkable

from torch import Tensor

T = TypeVar("T")


@runtime_checkable
class GatheredRows(Protocol):
    """Rows divided over several ranks, which can gather them all."""

    is_first: bool
    """Whether this is the rank that computes what only one rank should."""

    def gather(self, local: Tensor) -> Tensor:
        """All ranks' rows, in the order of one process; without a gradient."""
        ...


@runtime_checkable
class SharedRows(GatheredRows, Protocol):
    """Tokens, or a loss's targets, shared by several ranks."""

    def whole(self, local: Tensor) -> Tensor:
        """`gather` with a gradient, which is that of this rank's rows."""
        ...

    def own_of(self, whole: Tensor) -> Tensor:
        """This rank's rows of `whole`, in this rank's order."""
        ...

    def part(self, count: int) -> slice:
        """The outputs, out of `count`, that this rank computes."""
        ...


class Tree(Generic[T]):
    """The sum of leaves that arrive one at a time: in a binary tree, neighbors first."""

    def __init__(self, add: Callable[[T, T], T]):
        self._add = add
        self._subtrees: list[T] = []
        """Complete subtrees, each smaller than the one before it."""
        self._count = 0

    def add(self, leaf: T) -> None:
        # As a binary counter carries: two subtrees of the same size make the next larger one.
        self._count += 1
        for _ in range((self._count & -self._count).bit_length() - 1):
            leaf = self._add(self._subtrees.pop(), leaf)
        self._subtrees.append(leaf)

    def sum(self) -> T | None:
        """The sum of all leaves, None without any. No leaf may be added afterwards."""
        while len(self._subtrees) > 1:
            smallest = self._subtrees.pop()
            self._subtrees.append(self._add(self._subtrees.pop(), smallest))
        return self._subtrees[0] if self._subtrees else None


# Plain globals: a backward pass may run in a different thread than the forward.
_chunks = 0
_microbatches = 1
_tokens: SharedRows | None = None
_targets: SharedRows | None = None


@contextmanager
def one_order(chunks: int, microbatches: int = 1) -> Iterator[None]:
    """In this context, gradients are summed in one order. chunks: the model's `reduction_chunks`. microbatches: the
    number that each data-parallel rank has in the step."""
    global _chunks, _microbatches
    before = _chunks, _microbatches
    _chunks, _microbatches = chunks, microbatches
    try:
        yield
    finally:
        _chunks, _microbatches = before
        share(None, None)


def is_required() -> bool:
    return _chunks > 0


def microbatches() -> int:
    """The number of micro-batches that each data-parallel rank has in the step."""
    return _microbatches


def gradient_chunks() -> int:
    """The number of parts of a column product's outputs over which the gradient of its input is summed."""
    return max(_chunks, 1)


def share(tokens: SharedRows | None, targets: SharedRows | None) -> None:
    """Sets which tokens and targets are shared with other ranks, until the end of the micro-batch's backward."""
    global _tokens, _targets
    _tokens, _targets = tokens, targets


def shared_tokens() -> SharedRows | None:
    """How the rows that run through the model are shared; None if this rank has all, or without one order."""
    return _tokens if is_required() else None


def shared_targets() -> SharedRows | None:
    """As `shared_tokens`, for the rows from which the loss is computed."""
    return _targets if is_required() else None
