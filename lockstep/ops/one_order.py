"""The order of sums in a backward pass: that of the layout, or that of one process (`train.deterministic_layout`).

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


class Tree(Generic[T]):
    """The sum of leaves that come one after the other: in a binary tree, neighbors first."""

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
        """The sum of all leaves; none may be added afterwards. None: there are none."""
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
    """Within this context, gradients are summed in one order. `chunks`: those of the model's row products;
    `microbatches`: how many each data-parallel rank has in the step."""
    global _chunks, _microbatches
    before = _chunks, _microbatches
    _chunks, _microbatches = chunks, microbatches
    try:
        yield
    finally:
        _chunks, _microbatches = before
        share(None, None)


def is_asked() -> bool:
    return _chunks > 0


def microbatches() -> int:
    """How many micro-batches each data-parallel rank has in the step."""
    return _microbatches


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
