"""What a function computes on the CPU, recorded once and repeated without its Python.

A decode step of a small model spends most of its time between operators: each takes a few microseconds of Python, and
there are some hundred in a step. A tape calls the same kernels for the same addresses in the same order, so it gives
the same bits: what a CUDA graph is on a GPU.
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
"""Functions that tell a tensor's form, not its values."""
ALLOCATIONS = {"empty", "empty_like", "new_empty"}
"""Functions whose results have no values yet."""
CONSTANTS = {torch.arange, torch.tensor}
"""Functions of numbers alone, whose results nothing may write to: they are not repeated."""
ALIGNMENT = 64
"""Of memory, in bytes: a vector of the widest kernels."""


class Unrecordable(RuntimeError):
    """The function reads values of tensors, so it may do something else when it is repeated."""


class Arena:
    """Memory of tensors that are made while tapes are recorded. A tensor's memory is free when Python frees it.

    Tapes that share an arena overwrite each other's tensors, results included.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, np.ndarray] = {}
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)

    def lend(self, like: Tensor) -> Tensor:
        """A tensor of the same shape and dtype, whose memory is free when nothing refers to it any more."""
        size = max(ALIGNMENT, 1 << (like.nbytes - 1).bit_length())
        block = self._free[size].pop() if self._free[size] else self._new_block(size)
        lent = block[:]  # an object that ends with the tensor
        weakref.finalize(lent, self._free[size].append, block).atexit = False
        return torch.frombuffer(lent, dtype=like.dtype, count=like.numel()).view(like.shape)

    def borrowed(self, tensor: Tensor) -> Tensor:
        """The same tensor, but if its memory is from here, without keeping it from others."""
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


class Tape(TorchFunctionMode):
    """Calls `function`, without gradients, and records what it computes: kernels, and PyTorch's own functions.

    `results` are its results. `replay` computes them again, in place, from what the tensors that `function` has read
    contain by then. Raises Unrecordable.
    """

    def __init__(self, function: Callable[[], tuple[Tensor, ...]], arena: Arena):
        super().__init__()
        self.panels: list[tuple[Tensor, Tensor | None]] = []
        """Weights, and the panels that products read in their place."""
        self._arena = arena
        self._calls: list[tuple[Callable[..., Any], Iterable[Any]]] = []
        self._kept: list[Tensor] = []
        self._constants: set[int] = set()
        before = _modes()
        try:
            # In a context of its own: an interrupt at any line leaves nothing of it behind.
            results = copy_context().run(self._record, function)
        finally:  # a signal's exception may have come while PyTorch was about to begin or end a mode
            if (left := _modes()) != before:
                for _ in left:
                    torch._C._pop_torch_function_stack()
                for mode in before:
                    torch._C._push_on_torch_function_stack(mode)
        self.results = tuple(map(arena.borrowed, results))
        self._merged = [*_merged(self._calls)]

    def _record(self, function: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        with torch.no_grad(), native.noted_by(self), self:
            return function()

    def replay(self) -> tuple[Tensor, ...]:
        for call, arguments in self._merged:
            call(*arguments)
        return self.results

    def note(self, kernel: Callable[..., Any], values: list[Any], arguments: tuple[Any, ...]) -> None:
        """A kernel's call: `values` are `arguments` with addresses in place of tensors."""
        self._calls.append((kernel, values))
        with unrecorded():
            self._kept += map(self._arena.borrowed, _tensors(arguments))

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        options = options or {}
        if function.__name__ in READS and not isinstance(result := function(*arguments, **options), Tensor):
            return result
        given = [*_tensors((arguments, [*options.values()]))]
        versions = _versions(given)
        result = function(*arguments, **options)
        made = [*_tensors((result,))]
        shares = [any(_share(tensor, other) for other in given) for tensor in made]
        if function in CONSTANTS and not given:
            self._kept += made
            self._constants |= {tensor.untyped_storage().data_ptr() for tensor in made}
        elif versions != _versions(given):  # it writes into what it was given
            if any(tensor.untyped_storage().data_ptr() in self._constants for tensor in given):
                raise Unrecordable(f"{function.__name__} is given a constant, which it may write to")
            if not all(shares):
                raise Unrecordable(f"{function.__name__} writes into a tensor and makes another one")
            self._repeat(function, arguments, options)
        elif not made:
            if result is not None:
                raise Unrecordable(f"{function.__name__} reads the values of a tensor")
        elif not all(shares):  # else they are views
            if any(shares):
                raise Unrecordable(f"{function.__name__} makes a view and another tensor")
            result = _each(self._place, result)
            if function.__name__ not in ALLOCATIONS:
                if (kernel := _kernel_of(function, arguments, options, result)) is not None:
                    native.call(*kernel)  # which notes it, and computes the same once more
                    return result
                into = [*map(self._arena.borrowed, _tensors((result,)))]
                fill = partial(_fill, into[0]) if isinstance(result, Tensor) else partial(_fill_all, into)
                self._repeat(partial(fill, function), arguments, options)
        return result

    def _place(self, made: Tensor) -> Tensor:
        """A new tensor, in the arena's memory."""
        if not made.is_contiguous() or not made.numel():
            self._kept.append(made)
            return made
        return self._arena.lend(made).copy_(made)

    def _repeat(self, function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        arguments = _each(self._arena.borrowed, arguments)
        options = {name: _each(self._arena.borrowed, value) for name, value in options.items()}
        self._calls.append((partial(function, **options), arguments))


def _kernel_of(
    function: Any, arguments: tuple[Any, ...], options: dict[str, Any], result: Any
) -> tuple[Any, ...] | None:
    """`native.call`'s arguments that compute what a function of PyTorch's does, in less time.

    Rows that are looked up are not compared with the table's number of rows, as PyTorch does.
    """
    given = [*_tensors(arguments)]
    if not isinstance(result, Tensor) or not native.usable(result) or not result.numel():
        return None
    if not all(x.is_contiguous() for x in (*given, result)):
        return None
    if function is Tensor.add and len(given) == 2 and not options:
        alike = all((x.shape, x.dtype) == (result.shape, result.dtype) for x in given)
        return ("add", result.dtype, *given, result, result.numel()) if alike else None
    if function is F.embedding:
        rows, table = given
    elif function is Tensor.index_select and len(given) == 2 and arguments[1] == 0:
        table, rows = given
    else:
        return None
    if rows.dtype != torch.int64 or table.dtype != result.dtype:
        return None
    return "dispatch", result.dtype, table, rows, result, rows.numel(), 1, result.numel() // rows.numel()


def _merged(calls: Iterable[tuple[Callable[..., Any], Any]]) -> Iterator[tuple[Callable[..., Any], Iterable[Any]]]:
    """The same calls, those of kernels that follow each other in one."""
    for playable, group in groupby(calls, key=lambda call: native.is_playable(call[0])):
        run = [*group]
        yield from [(native.played(run), ())] if playable else run


@contextmanager
def unrecorded() -> Iterator[None]:
    """Within this context, nothing is recorded: what is read or computed here must hold for every replay."""
    with native.noted_by(None), torch._C.DisableTorchFunction():
        yield


def _modes() -> list[Any]:
    """The modes that are on, outermost first."""
    return [torch._C._get_function_stack_at(place) for place in range(torch._C._len_torch_function_stack())]


def _fill(into: Tensor, function: Callable[..., Tensor], *arguments: Any, **options: Any) -> None:
    into.copy_(function(*arguments, **options))


def _fill_all(into: list[Tensor], function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    for tensor, again in zip(into, _tensors((function(*arguments, **options),)), strict=True):
        tensor.copy_(again)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    """How often each was written to. An inference tensor does not count it, nor is it written to out of its mode."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _each(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The value with every tensor in it changed."""
    if isinstance(value, Tensor):
        return change(value)
    return type(value)(_each(change, each) for each in value) if isinstance(value, tuple | list) else value


def _share(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
