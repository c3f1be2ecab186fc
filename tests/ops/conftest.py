"""Operator tests run on several forms: the best kernels of this processor, the best portable ones, and the plain
PyTorch ones that serve where there are none; those of every other instruction set are slow tests."""

import pytest
import torch

from lockstep.ops import native
from lockstep.ops.native import instruction_sets

SETS = instruction_sets.supported()
BEST = {SETS[0].name, next(each.name for each in SETS if each.arithmetic == "portable")}
FORMS = [
    *(each.name if each.name in BEST else pytest.param(each.name, marks=pytest.mark.slow) for each in SETS),
    "pytorch",
]


def use(patch: pytest.MonkeyPatch, form: str) -> None:
    """Switches this process to a form; `patch.undo` and `forget_forms` switch back."""
    patch.setenv("LOCKSTEP_NATIVE", "0" if form == "pytorch" else "1")
    patch.setenv("LOCKSTEP_ISA", "" if form == "pytorch" else form)
    # A run in this process may have left the arithmetic that it asked for.
    patch.setattr(native, "_wanted_arithmetic", "auto")
    forget_forms()


def forget_forms() -> None:
    instruction_sets.supported.cache_clear()
    native.library.cache_clear()
    native._functions.clear()
    native._not_compiled.clear()


@pytest.fixture(params=FORMS, scope="module", autouse=True)
def form(request):
    patch = pytest.MonkeyPatch()
    use(patch, request.param)
    if request.param != "pytorch":
        assert native.library() is not None, "these tests need a C++ compiler: install g++"
        assert native.instruction_set() == request.param
    yield request.param
    patch.undo()
    forget_forms()


@pytest.fixture
def threads():
    """Sets the number of threads for a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
