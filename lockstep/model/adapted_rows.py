"""Which rows of a forward pass have which adapters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from lockstep.ops import unrecorded

if TYPE_CHECKING:
    from lockstep.model.adapters import Adapter


class AdaptedRows(NamedTuple):
    """An adapter, and the rows that have it."""

    adapter: Adapter
    rows: Int[Tensor, "adapted"] | None = None
    """int64 indices, on the model's device; None: all rows."""


_adapted: ContextVar[tuple[AdaptedRows, ...]] = ContextVar("adapted_rows", default=())


@contextmanager
def adapted(rows: Sequence[AdaptedRows]) -> Iterator[None]:
    """In this context, forward passes add to their rows the updates of these adapters. A row has at most one.

    For this thread alone: others may use the same model with other adapters, or none, at the same time.
    """
    token = _adapted.set(tuple(rows))
    try:
        yield
    finally:
        _adapted.reset(token)


def refuse_rows(rows_of_each: Iterable[Tensor | None], count: int) -> None:
    """Raises ValueError for a row that `count` rows do not have. Rows on a GPU are not checked."""
    with unrecorded():  # a step graph is recorded with these rows
        for rows in rows_of_each:
            if rows is not None and rows.device.type == "cpu" and any(not 0 <= row < count for row in rows.tolist()):
                raise ValueError(f"an adapter has a row outside of the {count} that are computed: {rows.tolist()}")


def adapted_rows() -> tuple[AdaptedRows, ...]:
    """Those of the context. None in compiled code, which `Decoder.run_blocks` refuses to call with any."""
    return () if torch.compiler.is_compiling() else _adapted.get()
