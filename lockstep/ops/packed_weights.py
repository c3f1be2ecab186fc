"""A cache of weights packed in the order in which a product reads them, as they are or as integers.

A product reads its weight in panels (`native/panels.h`). Many rows amortize packing them; a decode step does not, but
reads the same weights repeatedly. Such code has a `PackedWeights`, and calls `forget` when weights change. On a GPU
only integers are packed (`cuda/integer_linear.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from ctypes import c_int64
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lockstep.ops import cuda, native
from lockstep.ops.step_graph import unrecorded

FEW_ROWS = 128
"""With more rows, packing is too small a part of a product's time to cache the panels."""
MEMORY_SHARE = 0.25
"""The cache's limit, as a share of the memory that is free when the first weight is packed."""
GROUPS_ON_GPU = (0, 32, 128)
"""Those of the formats: a tensor core multiplies 32 integers or more, and Triton's tiles are powers of two."""


class Layout(NamedTuple):
    """What a weight's panels consist of."""

    bits: int = 0
    """Of integers with scales; 0: the weight's own numbers."""
    group: int = 0
    """Numbers along k with a common scale; 0: all of an output's."""
    rounded: Callable[[Tensor, Tensor | None], Tensor] | None = None
    """Without bits: the weight's numbers as they are packed, if not its own, given the scales of its rows or None."""

    def on_gpu(self, weight: Tensor) -> bool:
        """Whether the panels are those of the GPU's products."""
        return bool(self.bits) and self.group in GROUPS_ON_GPU and weight.ndim == 2 and cuda.usable(weight)

    def words(self, weight: Tensor) -> int:
        """The size of the panels in words of 4 bytes: of a matrix, or of stacked ones, one after the other."""
        *stacked, outputs, depth = weight.shape
        if self.on_gpu(weight):
            from lockstep.ops.cuda import integer_linear

            return integer_linear.words(outputs, depth, self.group)
        if self.bits:
            sizes = (depth, outputs, self.group) if self.group else (depth, outputs)
            return math.prod(stacked) * int(native.function(f"int{self.bits}_words")(*map(c_int64, sizes)))
        columns = native.function("panel_columns")()
        return math.prod(stacked) * int(-(-outputs // columns) * columns * -(-depth * weight.element_size() // 4))

    def pack(self, weight: Tensor, panels: Tensor, scales: Tensor | None = None) -> None:
        """Writes the panels. scales: of the weight's rows, if they are not those of this part of them."""
        if weight.ndim == 3:
            for matrix, part in zip(weight, panels.view(weight.shape[0], -1)):
                self.pack(matrix, part)
            return
        if self.on_gpu(weight):
            from lockstep.ops.cuda import integer_linear

            return integer_linear.pack(weight, panels, self.group)
        sizes = weight.shape[1], weight.shape[0]
        weight = weight if self.rounded is None else self.rounded(weight, scales)
        if not self.bits:
            return native.call("pack", weight.dtype, weight, *weight.stride(), panels, *sizes)
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        if self.group:
            return native.call("pack_int4", weight.dtype, weight, weight.stride(0), panels, *sizes, self.group)
        native.call("pack_int8", weight.dtype, weight, weight.stride(0), scales, panels, *sizes)

    def unpack(self, panels: Tensor, rows: Tensor, out: Tensor, outputs: int) -> None:
        """Writes the numbers that the integers in the panels stand for, for these rows of a weight with `outputs`, or
        of each of stacked ones."""
        if out.ndim == 3:
            for matrix, part in zip(out, panels.view(out.shape[0], -1)):
                self.unpack(part, rows, matrix, outputs)
            return
        group = (self.group,) if self.group else ()
        sizes = (len(rows), out.shape[1], outputs, *group)
        native.call(f"unpack_int{self.bits}", out.dtype, panels, rows.contiguous(), out, *sizes)


PLAIN = Layout()
Key = tuple[int, Layout]
"""A weight's address, and the layout of its panels."""


class Packed(NamedTuple):
    """A weight's panels."""

    identity: tuple[object, ...]
    """Of the weight as it was packed."""
    panels: Tensor
    scales: Tensor | None
    """Of its rows, if they were given."""


class PackedWeights:
    """Panels of weights, each packed at its first use after `forget`. Products have the same bits with or without them.

    Panels are only used while the weight has the storage and version counter with which it was packed. Writes that do
    not change the counter must be followed by `forget`: collectives, kernels called by address, PyTorch's fused
    optimizers, and anything that writes through `.data` or NumPy.
    """

    def __init__(self) -> None:
        self._panels: dict[Key, Packed] = {}
        # Storages of the weights whose panels are valid: referenced, so that no other tensor gets their address.
        self._current: dict[Key, torch.UntypedStorage] = {}
        self._budget: int | None = None
        self.generation = 0
        """Incremented whenever weights may have changed."""
        self.packing_seconds = 0.0

    def forget(self) -> None:
        """Call when weights may have changed. The memory of panels used since the last call is kept for repacking."""
        self.generation += 1
        if not self._current:
            return  # called twice, such as by an update and then by `generate`
        for key in self._panels.keys() - self._current.keys():
            self._release(key)
        self._current.clear()

    def forget_some(self, weights: Iterable[Tensor]) -> None:
        """`forget` of these weights alone."""
        self.generation += 1
        for key in self._keys_of(weights):
            self._current.pop(key, None)

    def release_some(self, weights: Iterable[Tensor]) -> None:
        """`release` of these weights alone."""
        self.generation += 1
        for key in self._keys_of(weights):
            self._release(key)

    def _keys_of(self, weights: Iterable[Tensor]) -> list[Key]:
        addresses = {weight.data_ptr() for weight in weights}
        return [key for key in self._panels if key[0] in addresses]

    def release(self) -> None:
        """`forget`, and frees the memory of all panels."""
        self.generation += 1
        self._current.clear()
        for key in list(self._panels):
            self._release(key)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """In this context, products with few rows read, and pack, these panels."""
        token = _in_use.set(self)
        try:
            yield
        finally:
            _in_use.reset(token)

    def valid(self, weight: Tensor, layout: Layout) -> Packed | None:
        """What `weight` was packed into, unless it may have changed since."""
        key = weight.data_ptr(), layout
        packed = self._panels.get(key)
        valid = packed is not None and key in self._current and packed.identity == _identity(weight)
        return packed if valid else None

    def panels_of(self, weight: Tensor, layout: Layout = PLAIN, scales: Tensor | None = None) -> Tensor | None:
        """`weight`'s panels, or None if there is too little memory or the weight has no version counter."""
        if weight.is_inference():
            return None
        if (packed := self.valid(weight, layout)) is not None:
            return packed.panels
        key, words = (weight.data_ptr(), layout), layout.words(weight)
        panels = self._panels[key].panels if key in self._panels else None
        if panels is None or panels.numel() != words:
            self._release(key)
            if not self._affords(4 * words, weight.device):
                return None
            panels = torch.empty(words, dtype=torch.int32, device=weight.device)
        began = time.perf_counter()
        layout.pack(weight, panels, scales)
        self.packing_seconds += time.perf_counter() - began
        self._panels[key] = Packed(_identity(weight), panels, scales)
        self._current[key] = weight.untyped_storage()
        return panels

    def _release(self, key: Key) -> None:
        self._current.pop(key, None)
        packed = self._panels.pop(key, None)
        if packed is not None and self._budget is not None:
            self._budget += packed.panels.nbytes

    def _affords(self, size: int, device: torch.device) -> bool:
        if self._budget is None:
            free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
            self._budget = int(MEMORY_SHARE * free)
        if size > self._budget:
            return False
        self._budget -= size
        return True


def _identity(weight: Tensor) -> tuple[object, ...]:
    return (*weight.shape, *weight.stride(), weight._version, weight.dtype)


_in_use: ContextVar[PackedWeights | None] = ContextVar("packed_weights", default=None)


@contextmanager
def unpacked() -> Iterator[None]:
    """In this context, no panels are read or packed: for products with weights that nothing uses again."""
    token = _in_use.set(None)
    try:
        yield
    finally:
        _in_use.reset(token)


def packed(weight: Tensor, rows: int, layout: Layout = PLAIN, scales: Tensor | None = None) -> Tensor | None:
    """The panels that a product with `rows` rows can read instead of the weight. scales: of its rows, as it is packed
    with them if it has not been yet."""
    return None if rows > FEW_ROWS else _cached(weight, layout, scales)


def packed_scales(weight: Tensor, layout: Layout) -> Tensor | None:
    """The scales that were given when the panels in use were packed."""
    weights = _in_use.get()
    known = None if weights is None or weight.is_inference() else weights.valid(weight, layout)
    return None if known is None else known.scales


class PackedWeight(nn.Parameter):
    """A frozen weight of which only the panels of its integers are in memory: it has a shape and a dtype, no values."""

    panels: Tensor
    packing: Layout
    """How they are laid out."""

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # torch declares it as an attribute, but computes it
        """Of what is in memory."""
        return self.panels.nbytes

    @classmethod
    def of(cls, weight: Tensor, layout: Layout) -> PackedWeight:
        packed = cls(torch.empty_like(weight, device="meta"), requires_grad=False)
        packed.panels, packed.packing = torch.empty(layout.words(weight), dtype=torch.int32), layout
        layout.pack(weight.detach(), packed.panels)
        return packed

    def numbers(self, rows: Int[Tensor, "rows"] | None = None) -> Float[Tensor, "*groups outputs in"]:
        """What the integers stand for, in the weight's dtype: all of it, or these rows of a matrix.

        Raises IndexError for a row that it does not have.
        """
        *stacked, outputs, depth = self.shape
        if rows is None:
            rows = torch.arange(outputs)
        elif not native.is_pretending():
            with unrecorded():
                if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < outputs:
                    raise IndexError(f"row {int(rows.max())} or {int(rows.min())} of a weight with {outputs} rows")
        out = torch.empty(*stacked, len(rows), depth, dtype=self.dtype)
        self.packing.unpack(self.panels, rows, out, outputs)
        return out


def integer_panels(weight: Tensor, layout: Layout, scales: Tensor | None = None) -> Tensor:
    """The panels of a weight's integers: its only ones, those in use, or new ones, with given scales of its rows."""
    if isinstance(weight, PackedWeight):
        return weight.panels
    if (panels := _cached(weight, layout, scales)) is None:
        with unrecorded():
            panels = torch.empty(layout.words(weight), dtype=torch.int32, device=weight.device)
        layout.pack(weight, panels, scales)
    return panels


def _cached(weight: Tensor, layout: Layout, scales: Tensor | None) -> Tensor | None:
    if (weights := _in_use.get()) is None:
        return None
    if (graph := native.recorder()) is None:
        return weights.panels_of(weight, layout, scales)
    with unrecorded():
        panels = weights.panels_of(weight, layout)
    graph.panels.append((weight, layout, panels))
    return panels


def free_memory() -> int:
    """Free memory of the machine in bytes."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 2**32
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
