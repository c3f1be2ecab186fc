"""Every operator test runs on both forms: the compiled one and the plain one that serves where no compiler is."""

import pytest

from lockstep.ops import native


@pytest.fixture(params=["compiled", "plain"], scope="module", autouse=True)
def form(request):
    patch = pytest.MonkeyPatch()
    patch.setenv("LOCKSTEP_NATIVE", "1" if request.param == "compiled" else "0")
    native.library.cache_clear()
    if request.param == "compiled":
        assert native.library() is not None, "these tests need a C++ compiler: install g++"
    yield request.param
    patch.undo()
    native.library.cache_clear()
