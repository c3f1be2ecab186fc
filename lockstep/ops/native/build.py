"""Compiles the kernels once for this machine and keeps them in the user's cache folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from lockstep.ops.cache import cache_folder, fingerprint

SOURCES = Path(__file__).parent
FLAGS = [
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-fopenmp",
    "-fno-math-errno",
    "-ffp-contract=off",
]


class CompilerMissing(Exception):
    """There is no C++ compiler, or it could not compile the kernels."""


def build() -> Path:
    """The shared library's path, compiled first if this source has not been compiled on this machine before.

    Raises CompilerMissing with the reason.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if not compiler:
        raise CompilerMissing("no C++ compiler was found; install g++ or set CXX")
    sources = sorted(SOURCES.glob("*.cpp"))
    command = [compiler, *FLAGS, *map(str, sources)]
    contents = [source.read_bytes() for source in sorted([*sources, *SOURCES.glob("*.h")])]
    target = cache_folder() / f"kernels-{fingerprint(*command, *contents)}.so"
    if not target.exists():
        _compile([*command, *_openmp_runtime()], target)
    return target


def _openmp_runtime() -> list[str]:
    """torch's own OpenMP library, where it brings one: two runtimes in a process would fight for the cores."""
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return [str(bundled[0]), f"-Wl,-rpath,{bundled[0].parent}"] if bundled else []


def _compile(command: list[str], target: Path) -> None:
    # Renamed into place when whole, so that processes that start together never load half a library.
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        partial = Path(scratch) / "kernels.so"
        result = subprocess.run([*command, "-o", str(partial)], capture_output=True, text=True)
        if result.returncode:
            raise CompilerMissing(f"{command[0]} could not compile the kernels:\n{result.stderr[-2000:]}")
        partial.replace(target)
