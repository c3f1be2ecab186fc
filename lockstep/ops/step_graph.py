"""A computation on the CPU, recorded once and replayed without its Python: what a CUDA graph is on a GPU.

A decode step of a small model spends most of its time between operators: each takes a few microseconds of Python, and
a step has about a hundred. A step graph calls the same kernels on the same addresses in the same order, so the bits
are the same.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lockstep.ops import native

READS = {
    "__get__", "__len__", "data_ptr", "dim", "element_size", "is_contiguous", "is_floating_point", "is_inference",
    "numel", "size", "storage_offset", "stride", "untyped_storage",
}  # fmt: skip
"""Functions that read a tensor's shape or layout, not its values."""
ALLOCATIONS = {"empty", "empty_like", "new_empty"}
"""Functions whose results are uninitialized."""
CONSTANTS = {torch.arange, torch.tensor}
"""Functions of numbers alone: not replayed, so nothing may write to their results."""
ALIGNMENT = 64
"""Of memory, in bytes: a vector of the widest kernels."""


class Unrecordable(RuntimeError):
    """The function reads tensor values, so it could behave differently when replayed."""


class Arena:
    """Memory for tensors created while step graphs are recorded, reused once Python frees a tensor.

    Graphs that share an arena overwrite each other's tensors, results included.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, np.ndarray] = {}
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)

    def allocate(self, like: Tensor) -> Tensor:
        """A tensor of the same shape and dtype, whose memory is reused once nothing refers to it."""
        size = max(ALIGNMENT, 1 << (like.nbytes - 1).bit_length())
        block = self._free[size].pop() if self._free[size] else self._new_block(size)
        buffer = block[:]  # an object with the tensor's lifetime
        weakref.finalize(buffer, self._free[size].append, block).atexit = False
        return torch.frombuffer(buffer, dtype=like.dtype, count=like.numel()).view(like.shape)

    def weak(self, tensor: Tensor) -> Tensor:
        """The same tensor; if its memory is the arena's, one that does not prevent its reuse."""
        block = self._blocks.get(tensor.untyped_storage().data_ptr())
        if block is None:
            return tensor
        whole = torch.frombuffer(block, dtype=tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _new_block(self, size: int) -> np.ndarray:
        raw = np.empty(size + ALIGNMENT, dtype=np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        block = raw[start : start + size]
        self._blocks[block.ctypes.data] = block
        return block


class StepGraph(TorchFunctionMode):
    """Calls `function`, without gradients, and records its calls of kernels and of PyTorch functions.

    `results` are its results. `replay` recomputes them in place, from the current values of the tensors that `function`
    read. Raises Unrecordable.
    """

    def __init__(self, function: Callable[[], tuple[Tensor, ...]], arena: Arena):
        super().__init__()
        self.panels: list[tuple[Tensor, Any, Tensor | None]] = []
        """Weights, with the layout and the panels that products read instead."""
        self._arena = arena
        self._calls: list[tuple[Callable[..., Any], Iterable[Any]]] = []
        self._referenced: list[Tensor] = []
        """Tensors that the calls read or write by address."""
        self._constants: set[int] = set()
        before = _modes()
        try:
            # In a separate context: an interrupt at any line leaves no context variable set.
            results = copy_context().run(self._record, function)
        finally:  # a signal's exception may have interrupted PyTorch while it entered or left a mode
            if (left := _modes()) != before:
                for _ in left:
                    torch._C._pop_torch_function_stack()
                for mode in before:
                    torch._C._push_on_torch_function_stack(mode)
        self.results = tuple(map(arena.weak, results))
        self._merged = [*_merged(self._calls)]

    def _record(self, function: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        with torch.no_grad(), native.recorded_by(self), self:
            return function()

    def replay(self) -> tuple[Tensor, ...]:
        for call, arguments in self._merged:
            call(*arguments)
        return self.results

    def record_kernel(self, kernel: Callable[..., Any], values: list[Any], arguments: tuple[Any, ...]) -> None:
        """Records a kernel call: `values` are `arguments` with addresses in place of tensors."""
        self._calls.append((kernel, values))
        with unrecorded():
            self._referenced += map(self._arena.weak, _tensors(arguments))

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        options = options or {}
        if function.__name__ in READS and not isinstance(result := function(*arguments, **options), Tensor):
            return result
        inputs = [*_tensors((arguments, [*options.values()]))]
        versions = _versions(inputs)
        result = function(*arguments, **options)
        outputs = [*_tensors((result,))]
        are_views = [any(_share(tensor, other) for other in inputs) for tensor in outputs]
        if function in CONSTANTS and not inputs:
            self._referenced += outputs
            self._constants |= {tensor.untyped_storage().data_ptr() for tensor in outputs}
        elif versions != _versions(inputs):  # it writes into its inputs
            if any(tensor.untyped_storage().data_ptr() in self._constants for tensor in inputs):
                raise Unrecordable(f"{function.__name__} takes a constant, which it may write to")
            if not all(are_views):
                raise Unrecordable(f"{function.__name__} writes into a tensor and creates another one")
            self._record_call(function, arguments, options)
        elif not outputs:
            if result is not None:
                raise Unrecordable(f"{function.__name__} reads the values of a tensor")
        elif not all(are_views):
            if any(are_views):
                raise Unrecordable(f"{function.__name__} creates a view and another tensor")
            result = _map_tensors(self._in_arena, result)
            if function.__name__ not in ALLOCATIONS:
                if (kernel := _equivalent_kernel(function, arguments, options, result)) is not None:
                    native.call(*kernel)  # records it, and computes the same values again
                    return result
                into = [*map(self._arena.weak, _tensors((result,)))]
                fill = partial(_fill, into[0]) if isinstance(result, Tensor) else partial(_fill_all, into)
                self._record_call(partial(fill, function), arguments, options)
        return result

    def _in_arena(self, tensor: Tensor) -> Tensor:
        """A new tensor, moved to the arena's memory."""
        if not tensor.is_contiguous() or not tensor.numel():
            self._referenced.append(tensor)
            return tensor
        return self._arena.allocate(tensor).copy_(tensor)

    def _record_call(self, function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        arguments = _map_tensors(self._arena.weak, arguments)
        options = {name: _map_tensors(self._arena.weak, value) for name, value in options.items()}
        self._calls.append((partial(function, **options), arguments))


def _equivalent_kernel(
    function: Any, arguments: tuple[Any, ...], options: dict[str, Any], result: Any
) -> tuple[Any, ...] | None:
    """Arguments of `native.call` for the kernel that computes the same as a PyTorch function, in less time.

    Unlike PyTorch, it does not check indices against the number of rows of a table.
    """
    inputs = [*_tensors(arguments)]
    if not isinstance(result, Tensor) or not native.usable(result) or not result.numel():
        return None
    if not all(x.is_contiguous() for x in (*inputs, result)):
        return None
    if function is Tensor.add and len(inputs) == 2 and not options:
        same_form = all((x.shape, x.dtype) == (result.shape, result.dtype) for x in inputs)
        return ("add", result.dtype, *inputs, result, result.numel()) if same_form else None
    if function is F.embedding:
        rows, table = inputs
    elif function is Tensor.index_select and len(inputs) == 2 and arguments[1] == 0:
        table, rows = inputs
    else:
        return None
    if rows.dtype != torch.int64 or table.dtype != result.dtype:
        return None
    return "dispatch", result.dtype, table, rows, result, rows.numel(), 1, result.numel() // rows.numel()


def _merged(calls: Iterable[tuple[Callable[..., Any], Any]]) -> Iterator[tuple[Callable[..., Any], Iterable[Any]]]:
    """The same calls, with each run of consecutive kernels combined into one."""
    for are_kernels, group in groupby(calls, key=lambda call: native.is_replayable(call[0])):
        run = [*group]
        yield from [(native.combined(run), ())] if are_kernels else run


@contextmanager
def unrecorded() -> Iterator[None]:
    """Nothing is recorded in this context: what is read or computed here must be valid for every replay."""
    with native.recorded_by(None), torch._C.DisableTorchFunction():
        yield


def _modes() -> list[Any]:
    """The active modes, outermost first."""
    return [torch._C._get_function_stack_at(place) for place in range(torch._C._len_torch_function_stack())]


def _fill(into: Tensor, function: Callable[..., Tensor], *arguments: Any, **options: Any) -> None:
    into.copy_(function(*arguments, **options))


def _fill_all(into: list[Tensor], function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    for tensor, value in zip(into, _tensors((function(*arguments, **options),)), strict=True):
        tensor.copy_(value)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    """How often each was written to. Inference tensors do not count, and are only written to in their mode."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Applies `change` to every tensor in nested tuples and lists."""
    if isinstance(value, Tensor):
        return change(value)
    return type(value)(_map_tensors(change, each) for each in value) if isinstance(value, tuple | list) else value


def _share(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
