"""The compiled kernels in the cache folder, and what happens without them."""

import errno
import os
import platform
import shutil
import subprocess
import sys
import warnings

import pytest
import torch

from lockstep import ops
from lockstep.ops.native import build, compiling
from lockstep.ops.native.instruction_sets import BY_MACHINE, supported
from tests.ops.conftest import forget_forms, use


@pytest.fixture(scope="module", autouse=True)
def form():
    """Each test chooses the kernels itself."""


@pytest.fixture
def fresh_kernels(monkeypatch):
    """Kernels are looked for again in the test, and after it."""
    use(monkeypatch, supported()[0].name)
    yield
    monkeypatch.undo()
    forget_forms()


PROGRAM = "import torch; from lockstep import ops; print(ops.linear(torch.ones(2, 3), torch.ones(2, 3)).sum().item())"


def compiler_of(folder, before=""):
    """A g++ that does not optimise, which takes a fifth of the time, after these lines of shell."""
    script = folder / "g++"
    script.write_text(f'#!/bin/sh\n{before}\nexec g++ "$@" -O0\n')
    script.chmod(0o700)
    return str(script)


def cache_kernels(folder, monkeypatch):
    """The best kernels, as compiled with `CXX`, in a cache folder of their own: copies, for compiling takes long."""
    with monkeypatch.context() as patch:
        patch.delenv("CXX", raising=False)
        compiled = build.library_path(supported()[0])
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    with monkeypatch.context() as patch:
        patch.setattr(build, "compile_kernels", lambda compiler, flags, target, umask: shutil.copy(compiled, target))
        return build.library_path(supported()[0])


@pytest.mark.slow
def test_damaged_kernels_are_compiled_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", compiler_of(tmp_path, f"echo >> {tmp_path}/calls"))
    library = cache_kernels(tmp_path, monkeypatch)
    # In processes of their own: without the check the second would end by a signal.
    run = [sys.executable, "-c", PROGRAM]
    assert subprocess.run(run, capture_output=True, text=True).stdout.strip() == "12.0"
    assert not (tmp_path / "calls").exists(), "whole kernels are used as they are"
    library.write_bytes(library.read_bytes()[:4096])
    assert subprocess.run(run, capture_output=True, text=True).stdout.strip() == "12.0"
    assert (tmp_path / "calls").exists()


def test_without_a_compiler_those_that_were_compiled_before_are_used(tmp_path, monkeypatch, fresh_kernels):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build, "SHIPPED", tmp_path)
    library = cache_kernels(tmp_path, monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    with warnings.catch_warnings(action="error"):
        assert ops.linear(torch.ones(2, 3), torch.ones(2, 3)).sum() == 12 and ops.arithmetic() != "pytorch"
    for compiler in ("", str(tmp_path / "absent")):
        monkeypatch.setenv("CXX", compiler)
        assert build.library_path(supported()[0]) == library
    monkeypatch.delenv("CXX")
    library.unlink()
    with pytest.raises(compiling.CompilerMissing, match="no C[+][+] compiler was found"):
        build.library_path(supported()[0])


def test_kernels_that_a_full_disk_does_not_take_are_refused_with_the_folder(tmp_path, monkeypatch):
    def compile_kernels(compiler, flags, target, umask):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "compile_kernels", compile_kernels)
    with pytest.raises(compiling.CompilerMissing, match=f"cannot be cached in {tmp_path}/lockstep: No space left"):
        build.library_path(supported()[0])


@pytest.mark.slow
def test_a_compiler_that_does_not_know_the_newest_instructions_serves_the_next_ones(tmp_path):
    best, following, *_ = (each for each in supported() if not each.emulated)
    flag = next(flag for flag in reversed(best.flags) if flag.startswith("-m") and flag not in following.flags)
    older = compiler_of(tmp_path, f'case "$*" in *{flag}*) echo "unknown option {flag}" >&2; exit 1;; esac')
    program = f"""
from lockstep import ops
print(ops.instruction_set(), ops.arithmetic())
try:
    print(ops.set_arithmetic({best.arithmetic!r}))
except ValueError as error:
    print(str(error).replace("\\n", " "))
"""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "CXX": older}
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    used, asked = result.stdout.splitlines()
    assert used == f"{following.name} {following.arithmetic}"
    assert f"using the kernels for {following.name}, which are slower" in result.stderr and flag in result.stderr
    others = [each for each in supported() if each is not best and each.arithmetic == best.arithmetic]
    if others:
        assert asked == best.arithmetic
    else:
        assert f"arithmetic {best.arithmetic} could not be compiled ({best.name})" in asked and flag in asked
    assert "using the plain PyTorch operators" not in result.stderr


def test_a_wheel_brings_what_the_compiler_could_compile(tmp_path, monkeypatch):
    # With the real compiler: tests/test_wheel.py. Here only what becomes of a refusal.
    best, *others = BY_MACHINE[platform.machine()]

    def compile_kernels(compiler, flags, target):
        if target.name == compiling.file_name(best):
            raise compiling.CompilerMissing("unknown option")
        target.touch()

    monkeypatch.setattr(compiling, "compile_kernels", compile_kernels)
    with pytest.raises(compiling.CompilerMissing, match="unknown option"):
        compiling.compile_all(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {compiling.file_name(each) for each in others}


@pytest.mark.parametrize("compiler", ["/nonsense", "/bin/true", "/bin/false"])
def test_an_unusable_compiler_leaves_the_plain_forms_and_a_warning(tmp_path, monkeypatch, fresh_kernels, compiler):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    with pytest.warns(UserWarning, match="using the plain PyTorch operators"):
        assert ops.arithmetic() == "pytorch"
    assert ops.linear(torch.ones(2, 3), torch.ones(2, 3)).sum() == 12


@pytest.mark.slow
def test_importing_the_operators_calls_a_librarys_vector_functions_once_by_one_thread():
    script = """
import torch
called = {name: [] for name in ("cos", "sqrt", "exp", "log", "tanh", "pow")}
for name, seen in called.items():
    def recorded(x, *rest, function=getattr(torch, name), seen=seen):
        seen.append((x.numel(), x.dtype))
        return function(x, *rest)
    setattr(torch, name, recorded)
import lockstep.ops
assert all(seen[:2] == [(1, torch.float32), (1, torch.float64)] for seen in called.values()), called
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
