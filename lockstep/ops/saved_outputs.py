"""Selective activation checkpointing: operator outputs that a recomputed forward reuses from the first one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TypeVar

from torch import Tensor

Output = TypeVar("Output", Tensor, tuple[Tensor, Tensor])


class SavedOutputs:
    """Outputs of the chosen operators: saved in the first forward, returned in the same order in recomputed ones."""

    def __init__(self, operators: Collection[str]):
        self.operators = frozenset(operators)
        self._outputs: list[tuple[Tensor, ...]] = []
        self._next: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that the first forward saved."""
        return sum(part.nbytes for parts in self._outputs for part in parts)

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts for the first forward and for recomputed ones, as `torch.utils.checkpoint` takes them."""
        return _ForwardPass(self, None), _ForwardPass(self, 0)

    def start(self, first: int | None) -> None:
        """Saves from now on if `first` is None, else returns saved outputs from number `first` on."""
        self._next = first

    def take(self, compute: Callable[[], Output]) -> Output:
        if self._next is None:
            output = compute()
            # Detached: autograd makes the tensors that an operator returns part of its graph.
            parts = (output,) if isinstance(output, Tensor) else output
            self._outputs.append(tuple(part.detach() for part in parts))
            return output
        saved = tuple(part.detach() for part in self._outputs[self._next])
        self._next += 1
        return saved[0] if len(saved) == 1 else saved  # type: ignore[return-value]


class _ForwardPass(AbstractContextManager[None]):
    """One forward pass. Entered again for each recomputation: each half of a split backward recomputes one."""

    def __init__(self, outputs: SavedOutputs, first: int | None):
        self.outputs, self.first = outputs, first

    def __enter__(self) -> None:
        self._token = _active.set(self.outputs)
        self.outputs.start(self.first)

    def __exit__(self, *error: object) -> None:
        _active.reset(self._token)


_active: ContextVar[SavedOutputs | None] = ContextVar("saved_outputs", default=None)


def saved_output(operator: str, compute: Callable[[], Output]) -> Output:
    """`compute()`; in a recomputed forward, the output that the first one saved, if it saves this operator's."""
    outputs = _active.get()
    return compute() if outputs is None or operator not in outputs.operators else outputs.take(compute)
