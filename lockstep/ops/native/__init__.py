"""The operators' fast CPU forms: C++ for this processor's instructions, called through ctypes.

A wheel includes them compiled; a source checkout compiles them at first use. If neither is possible, or with
LOCKSTEP_NATIVE=0, the plain PyTorch forms are used: slower, and with different bits, but trainer and generator use the
same form, so they agree either way.
"""

from __future__ import annotations

import ctypes
import os
import struct
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep.ops.native.build import library_path
from lockstep.ops.native.compiling import CompilerMissing
from lockstep.ops.native.instruction_sets import InstructionSet, supported

SUFFIX = {torch.float32: "_f32", torch.bfloat16: "_bf16"}


ARITHMETICS = ("auto", "portable", "bf16_pairs", "bf16_tiles", "pytorch")
_NEEDS = {"portable": "SSE4.2 or NEON", "bf16_pairs": "AVX512-BF16", "bf16_tiles": "AMX or plain_tiles"}


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None if they are switched off or cannot be compiled (with a warning)."""
    if os.environ.get("LOCKSTEP_NATIVE", "1") == "0":
        return None
    reason: CompilerMissing | None = None
    for each in _usable_sets():
        try:
            path = library_path(each)
        except CompilerMissing as error:
            # An older compiler may not know a processor's newest instructions.
            reason = reason or error
            _not_compiled[each.name] = str(error)
            continue
        if reason is not None:
            warnings.warn(f"using the kernels for {each.name}, which are slower: {reason}", stacklevel=2)
        _offer_openmp()
        return ctypes.CDLL(str(path))
    if _wanted_arithmetic == "auto":  # else `_usable_sets` refuses it
        warnings.warn(f"using the plain PyTorch operators, which are slower: {reason}", stacklevel=2)
    return None


def _offer_openmp() -> None:
    """Makes the kernels use torch's OpenMP runtime, which is already loaded: two would compete for the cores."""
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    ctypes.CDLL(str(bundled[0]) if bundled else "libgomp.so.1", mode=ctypes.RTLD_GLOBAL)


def _usable_sets() -> list[InstructionSet]:
    """Instruction sets of the requested arithmetic, best first, without those whose kernels could not be compiled."""
    compiled = [each for each in supported() if each.name not in _not_compiled]
    if _wanted_arithmetic == "auto":
        return [each for each in compiled if not each.emulated or each.name == os.environ.get("LOCKSTEP_ISA")]
    return [each for each in compiled if each.arithmetic == _wanted_arithmetic]


def _chosen() -> InstructionSet:
    wanted = _wanted_arithmetic
    if sets := _usable_sets():
        return sets[0]
    for each in supported():
        if each.arithmetic == wanted and each.name in _not_compiled:
            raise ValueError(
                f"the kernels for arithmetic {wanted} could not be compiled ({each.name}): {_not_compiled[each.name]}"
            )
    raise ValueError(
        f"arithmetic {wanted} needs {_NEEDS[wanted]}, which this processor lacks or LOCKSTEP_ISA rules out "
        f"(instruction sets here: {', '.join(each.name for each in supported())})"
    )


def set_arithmetic(name: str) -> str:
    """Selects the arithmetic of this process, or with `auto` the processor's fastest. Returns it.

    `pytorch` is the arithmetic of the plain PyTorch forms: the only one available if they are used. Existing tensors
    are not recomputed. Raises ValueError if the processor does not support the arithmetic.
    """
    global _wanted_arithmetic
    if name not in ARITHMETICS:
        raise ValueError(f'arithmetic is "{name}"; it can be {", ".join(ARITHMETICS)}')
    if name in ("auto", "pytorch") and library() is None:
        return arithmetic()
    if os.environ.get("LOCKSTEP_NATIVE", "1") == "0":
        raise ValueError(f"arithmetic {name} needs the compiled operators, which LOCKSTEP_NATIVE=0 switches off")
    if name == "pytorch":
        raise ValueError("arithmetic pytorch is that of the plain operators, which need LOCKSTEP_NATIVE=0")
    before, _wanted_arithmetic = _wanted_arithmetic, name
    library.cache_clear()
    _functions.clear()
    try:
        _chosen()
        library()
        return _chosen().arithmetic
    except ValueError:
        _wanted_arithmetic = before
        library.cache_clear()
        raise


def is_emulated(arithmetic: str) -> bool:
    """Whether this processor lacks the instructions for `arithmetic` and can only emulate it, many times slower."""
    sets = [each for each in supported() if each.arithmetic == arithmetic]
    return bool(sets) and all(each.emulated for each in sets)


def arithmetic() -> str:
    """The arithmetic of the CPU operators, which determines their bits: `portable` (the same on every processor),
    `bf16_pairs`, `bf16_tiles` or `pytorch` (the plain forms, which are used without compiled kernels).
    """
    return "pytorch" if library() is None else _chosen().arithmetic


def instruction_set() -> str:
    """The instructions that the CPU operators use, such as `avx2`; `pytorch` if they are not compiled."""
    return "pytorch" if library() is None else _chosen().name


def build_name() -> str:
    """The name of the kernels in use, unique to their sources, compiler and instructions."""
    kernels = library()
    return "pytorch" if kernels is None else Path(kernels._name).name


def usable(x: Tensor) -> bool:
    """Whether compiled kernels are available for this tensor: on the CPU, float32 or bfloat16."""
    return x.device.type == "cpu" and x.dtype in SUFFIX and (_pretending or library() is not None)


def call(name: str, dtype: torch.dtype, *arguments: Tensor | int | float | None) -> None:
    """Calls `name` for this dtype; passes tensors as addresses, None as null, integers as int64, floats as float."""
    if _pretending:
        return
    bound = _functions.get((name, dtype)) or _bind(name, dtype, arguments)
    values = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
    if (recording := _recorder.get()) is not None:
        recording.record_kernel(bound, values, arguments)
    bound(*values)


def is_replayable(kernel: Callable[..., Any]) -> bool:
    """Whether `combined` takes it."""
    return hasattr(library(), f"replay_{getattr(kernel, '__name__', '')}")


def combined(calls: Sequence[tuple[Any, Sequence[int | float | None]]]) -> Callable[[], None]:
    """One call that makes all of these, without Python between them; each as `record_kernel` gets it."""
    words: list[int] = []
    for kernel, values in calls:
        replay = ctypes.cast(function(f"replay_{kernel.__name__}"), ctypes.c_void_p).value
        words += [replay or 0, len(values), *map(_word, values, kernel.argtypes)]
    return partial(function("replay_calls"), (ctypes.c_int64 * len(words))(*words), ctypes.c_int64(len(calls)))


def _word(value: int | float | None, kind: type) -> int:
    """The encoding that `from_word` in replay.h reads."""
    return int.from_bytes(struct.pack("<f", value), "little") if kind is ctypes.c_float else int(value or 0)


class KernelRecorder(Protocol):
    """Records every kernel call: a step graph."""

    def record_kernel(self, kernel: Callable[..., Any], values: list[Any], arguments: tuple[Any, ...]) -> None:
        """`values` are `arguments` with addresses in place of tensors."""


@contextmanager
def recorded_by(recorder: KernelRecorder | None) -> Iterator[None]:
    """In this context, `recorder` records the kernels that this thread calls."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


def recorder() -> Any:
    """The active recorder, or None."""
    return _recorder.get()


@contextmanager
def pretending() -> Iterator[None]:
    """In this context, operators allocate and save as usual but compute nothing: for tensors without values."""
    global _pretending
    _pretending = True
    try:
        yield
    finally:
        _pretending = False


def is_pretending() -> bool:
    return _pretending


def function(name: str) -> Any:
    """A function of the compiled kernels; it returns an int unless bound otherwise."""
    compiled = library()
    if compiled is None:
        raise RuntimeError(f"{name} was called, but the native operators are not available")
    return getattr(compiled, name)


_recorder: ContextVar[KernelRecorder | None] = ContextVar("recorder", default=None)
_pretending = False
_wanted_arithmetic = "auto"
_not_compiled: dict[str, str] = {}
"""Instruction sets that could not be compiled, by name, with the reason."""
_functions: dict[tuple[str, torch.dtype], Any] = {}
_C_TYPES = {int: ctypes.c_int64, float: ctypes.c_float}


def _bind(name: str, dtype: torch.dtype, arguments: tuple[Tensor | int | float | None, ...]) -> Any:
    bound = function(name + SUFFIX[dtype])
    bound.argtypes = [_C_TYPES.get(type(a), ctypes.c_void_p) for a in arguments]
    bound.restype = None
    _functions[name, dtype] = bound
    return bound
