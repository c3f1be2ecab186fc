"""Compiles the kernels. Only imports the standard library: a wheel is built without torch."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from lockstep.ops.native.instruction_sets import BY_MACHINE, InstructionSet

SOURCES = Path(__file__).parent
FLAGS = [
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fopenmp",
    "-fno-math-errno",
    # Products and sums are only fused where the source says so, for the same bits from every compiler.
    "-ffp-contract=off",
]


class CompilerMissing(Exception):
    """There is no C++ compiler, or it could not compile the kernels."""


def find_compiler() -> str | None:
    """CXX, or else g++ or clang++ if one is on the PATH."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")


def file_name(instructions: InstructionSet) -> str:
    """The file name of the shared library in a wheel."""
    return f"kernels-{platform.machine().lower()}-{instructions.name}.so"


def compile_kernels(compiler: str, flags: list[str], target: Path, umask: int = -1) -> None:
    """Compiles the kernels; raises CompilerMissing if that fails. umask: the compiler's; -1: this process's.

    OpenMP is not linked: its functions come from the runtime that torch has loaded, whose file name varies.
    """
    sources = sorted(SOURCES.glob("*.cpp"))
    # Renamed into place when complete, so that concurrent processes never load a partial library.
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = [str(Path(scratch) / f"{source.stem}.o") for source in sources]
        commands = [[compiler, *flags, "-c", str(s), "-o", o] for s, o in zip(sources, objects)]
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            for _ in pool.map(partial(_run, umask=umask), commands):
                pass
        library = Path(scratch) / "kernels.so"
        _run([compiler, "-shared", *objects, "-o", str(library)], umask)
        if not library.is_file():
            raise CompilerMissing(f"{compiler} compiled nothing")
        with library.open("rb+") as file:
            os.fsync(file.fileno())
        library.replace(target)


def _run(command: list[str], umask: int) -> None:
    try:
        result = subprocess.run([*shlex.split(command[0]), *command[1:]], capture_output=True, text=True, umask=umask)
    except OSError as error:
        raise CompilerMissing(f"the compiler {command[0]} cannot be run: {error}; install g++ or set CXX") from error
    if result.returncode:
        raise CompilerMissing(f"{command[0]} could not compile the kernels:\n{result.stderr[-2000:]}")


def compile_all(folder: Path) -> None:
    """Compiles the kernels for every instruction set of this kind of machine, for a wheel.

    Raises CompilerMissing if there is no compiler, or, after compiling the others, if some could not be compiled.
    """
    compiler = find_compiler()
    if not compiler:
        raise CompilerMissing("no C++ compiler was found; install g++ or set CXX")
    folder.mkdir(parents=True, exist_ok=True)
    missing: list[CompilerMissing] = []
    for instructions in BY_MACHINE.get(platform.machine().lower(), ()):
        try:
            compile_kernels(compiler, [*FLAGS, *instructions.flags], folder / file_name(instructions))
        except CompilerMissing as error:  # an older compiler may not know the newest instructions
            missing.append(error)
    if missing:
        raise missing[0]
