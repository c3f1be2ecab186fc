"""Every operator test runs on all forms: the kernels of each instruction set that this processor has, best first, and
the plain PyTorch ones that serve where there are none."""

import pytest

from lockstep.ops import native
from lockstep.ops.native import instruction_sets

FORMS = [*(each.name for each in instruction_sets.supported()), "pytorch"]


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
