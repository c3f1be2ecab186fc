"""Selective activation checkpointing: operator outputs that a recomputed forward reuses from the first one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TypeVar

from torch import Tensor

Output = TypeVar("Output", Tensor, tuple[Tensor, Tensor])


class Tape:
    """The outputs of the chosen operators while recording, returned in the same order while replaying."""

    def __init__(self, operators: Collection[str]):
        self.operators = frozenset(operators)
        self._outputs: list[tuple[Tensor, ...]] = []
        self._next: int | None = None

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts for the first forward and for recomputed ones, as `torch.utils.checkpoint` takes them."""
        return _Running(self, None), _Running(self, 0)

    def start(self, first: int | None) -> None:
        """Records from now on, or replays from output number `first` on."""
        self._next = first

    def take(self, compute: Callable[[], Output]) -> Output:
        if self._next is None:
            output = compute()
            # Detached: autograd makes the tensors that an operator returns part of its graph.
            parts = (output,) if isinstance(output, Tensor) else output
            self._outputs.append(tuple(part.detach() for part in parts))
            return output
        kept = tuple(part.detach() for part in self._outputs[self._next])
        self._next += 1
        return kept[0] if len(kept) == 1 else kept  # type: ignore[return-value]


class _Running(AbstractContextManager[None]):
    """A forward pass with a tape. Entered again for each replay: each half of a split backward recomputes one."""

    def __init__(self, tape: Tape, first: int | None):
        self.tape, self.first = tape, first

    def __enter__(self) -> None:
        self._token = _tape.set(self.tape)
        self.tape.start(self.first)

    def __exit__(self, *error: object) -> None:
        _tape.reset(self._token)


_tape: ContextVar[Tape | None] = ContextVar("tape", default=None)


def keep(operator: str, compute: Callable[[], Output]) -> Output:
    """`compute()`, or in a recomputed forward pass its result in the first one, if a tape keeps this operator."""
    tape = _tape.get()
    return compute() if tape is None or operator not in tape.operators else tape.take(compute)
