"""Outputs of operators that a recomputed forward pass takes from the first one instead of computing them again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TypeVar

from torch import Tensor

Output = TypeVar("Output", Tensor, tuple[Tensor, Tensor])


class Tape:
    """What the chosen operators put out while recording, handed out again in the same order while replaying."""

    def __init__(self, operators: Collection[str]):
        self.operators = frozenset(operators)
        self._outputs: list[tuple[Tensor, ...]] = []
        self._next: int | None = None

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For the first forward and for the recomputed one, as `torch.utils.checkpoint` asks for them."""
        return self._running(None), self._running(0)

    @contextmanager
    def _running(self, first: int | None) -> Iterator[None]:
        token, self._next = _tape.set(self), first
        try:
            yield
        finally:
            _tape.reset(token)

    def take(self, compute: Callable[[], Output]) -> Output:
        if self._next is None:
            output = compute()
            # Detached: autograd makes the very tensors that an operator returns part of its graph.
            parts = (output,) if isinstance(output, Tensor) else output
            self._outputs.append(tuple(part.detach() for part in parts))
            return output
        kept = tuple(part.detach() for part in self._outputs[self._next])
        self._next += 1
        return kept[0] if len(kept) == 1 else kept  # type: ignore[return-value]


_tape: ContextVar[Tape | None] = ContextVar("tape", default=None)


def keep(operator: str, compute: Callable[[], Output]) -> Output:
    """`compute()`, or in a recomputed forward pass what it was in the first one, where a tape keeps this operator."""
    tape = _tape.get()
    return compute() if tape is None or operator not in tape.operators else tape.take(compute)
