"""Compiles the kernels, once for each instruction set, and keeps them in the user's cache folder."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lockstep.ops.cache import cache_folder, fingerprint
from lockstep.ops.native.instruction_sets import BY_MACHINE, InstructionSet

SOURCES = Path(__file__).parent
SHIPPED = SOURCES / "built"
"""Where a wheel brings the kernels compiled."""
FLAGS = [
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fopenmp",
    "-fno-math-errno",
    # A product and a sum are one operation only where the source says so: the same bits from every compiler.
    "-ffp-contract=off",
]


class CompilerMissing(Exception):
    """There is no C++ compiler, or it could not compile the kernels."""


def library_path(instructions: InstructionSet) -> Path:
    """The shared library for these instructions: the wheel's, else one compiled from this source, now if need be.

    Raises CompilerMissing with the reason.
    """
    shipped = SHIPPED / file_name(instructions)
    if shipped.is_file():
        return shipped
    compiler = find_compiler()
    if not compiler:
        raise CompilerMissing("no C++ compiler was found; install g++ or set CXX")
    flags = [*FLAGS, *instructions.flags]
    target = cache_folder() / f"kernels-{instructions.name}-{fingerprint(compiler, *flags, *_contents())}.so"
    if not target.exists():
        compile_kernels(compiler, flags, target)
    return target


def find_compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")


def file_name(instructions: InstructionSet) -> str:
    return f"kernels-{platform.machine().lower()}-{instructions.name}.so"


def compile_kernels(compiler: str, flags: list[str], target: Path) -> None:
    """Raises CompilerMissing where that fails.

    OpenMP is not linked: its functions are those of the runtime that torch has loaded, whatever its file is called.
    """
    sources = sorted(SOURCES.glob("*.cpp"))
    # Renamed into place when whole, so that processes that start together never load half a library.
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = [str(Path(scratch) / f"{source.stem}.o") for source in sources]
        commands = [[compiler, *flags, "-c", str(s), "-o", o] for s, o in zip(sources, objects)]
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            for _ in pool.map(_run, commands):
                pass
        partial = Path(scratch) / "kernels.so"
        _run([compiler, "-shared", *objects, "-o", str(partial)])
        partial.replace(target)


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise CompilerMissing(f"{command[0]} could not compile the kernels:\n{result.stderr[-2000:]}")


def build_all(folder: Path) -> list[Path]:
    """Compiles the kernels of this kind of machine for every instruction set, for a wheel. Raises CompilerMissing."""
    compiler = find_compiler()
    if not compiler:
        raise CompilerMissing("no C++ compiler was found")
    folder.mkdir(parents=True, exist_ok=True)
    targets = []
    for instructions in BY_MACHINE.get(platform.machine().lower(), ()):
        targets.append(folder / file_name(instructions))
        compile_kernels(compiler, [*FLAGS, *instructions.flags], targets[-1])
    return targets


def _contents() -> list[bytes]:
    return [source.read_bytes() for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")])]
