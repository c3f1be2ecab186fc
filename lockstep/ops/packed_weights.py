"""Weights kept in the order in which a product of few rows reads them.

A product reads its weight in panels (`native/panels.h`). Many rows pay for laying the panels out; a decode step does
not, and reads the same weights again and again. Whoever does so owns a `PackedWeights`, and says when they change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import torch
from torch import Tensor

from lockstep.ops import native

FEW_ROWS = 128
"""Above it laying out the panels costs a product too little to keep them."""
MEMORY_SHARE = 0.25
"""Of the memory that is free when the first weight is packed."""


class PackedWeights:
    """Panels of weights, each made at its first use after `forget`. The bits of products are the same with or without.

    A panel serves only while the weight's storage and version counter are those that it was made from. Writers that
    leave the counter alone must be followed by `forget`: collectives, kernels called by address, fused optimizers of
    PyTorch, and whatever writes through `.data` or NumPy.
    """

    def __init__(self) -> None:
        self._panels: dict[int, tuple[tuple[object, ...], Tensor]] = {}
        # Storages of the weights whose panels are up to date: held, so that no other tensor takes their address.
        self._current: dict[int, torch.UntypedStorage] = {}
        self._budget: int | None = None

    def forget(self) -> None:
        """The weights may have changed. Memory is kept for the next panels of those that were used since last time."""
        if not self._current:
            return  # said twice, as by an update and by the call of `generate` after it
        for address in self._panels.keys() - self._current.keys():
            self._release(address)
        self._current.clear()

    def release(self) -> None:
        """As `forget`, and gives the memory of all panels back."""
        self._current.clear()
        for address in list(self._panels):
            self._release(address)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within it products of few rows read, and make, these panels."""
        token = _in_use.set(self)
        try:
            yield
        finally:
            _in_use.reset(token)

    def panels_of(self, weight: Tensor) -> Tensor | None:
        """`weight`'s panels, or None where memory is too short for them or the weight has no version to go by."""
        if weight.is_inference():
            return None
        address = weight.data_ptr()
        identity = (*weight.shape, *weight.stride(), weight._version, weight.dtype)
        known, panels = self._panels.get(address, (None, None))
        if panels is not None and known == identity and address in self._current:
            return panels
        words = panel_words(weight)
        if panels is None or panels.numel() != words:
            self._release(address)
            if not self._affords(4 * words):
                return None
            panels = torch.empty(words, dtype=torch.int32)
        native.call("pack", weight.dtype, weight, *weight.stride(), panels, weight.shape[1], weight.shape[0])
        self._panels[address] = identity, panels
        self._current[address] = weight.untyped_storage()
        return panels

    def _release(self, address: int) -> None:
        self._current.pop(address, None)
        _, panels = self._panels.pop(address, (None, None))
        if panels is not None and self._budget is not None:
            self._budget += panels.nbytes

    def _affords(self, size: int) -> bool:
        if self._budget is None:
            self._budget = int(MEMORY_SHARE * free_memory())
        if size > self._budget:
            return False
        self._budget -= size
        return True


_in_use: ContextVar[PackedWeights | None] = ContextVar("packed_weights", default=None)


def packed(weight: Tensor, rows: int) -> Tensor | None:
    """The panels that a product of so many rows may read instead of the weight."""
    weights = _in_use.get()
    return weights.panels_of(weight) if weights is not None and rows <= FEW_ROWS else None


def panel_words(weight: Tensor) -> int:
    """Words of 4 bytes that a weight's panels take."""
    outputs, depth = weight.shape
    columns = native.function("panel_columns")()
    return -(-outputs // columns) * columns * -(-depth * weight.element_size() // 4)


def free_memory() -> int:
    """Bytes that the machine can still give."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 2**32
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
