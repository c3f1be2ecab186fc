"""Where the compiled kernels are: brought by a wheel, or compiled once and kept in the user's cache folder."""

from __future__ import annotations

from pathlib import Path

from lockstep.ops.cache import cache_folder, fingerprint
from lockstep.ops.native.compiling import (
    FLAGS,
    SOURCES,
    CompilerMissing,
    compile_kernels,
    file_name,
    find_compiler,
)
from lockstep.ops.native.instruction_sets import InstructionSet

SHIPPED = SOURCES / "built"


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
    contents = [source.read_bytes() for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")])]
    target = cache_folder() / f"kernels-{instructions.name}-{fingerprint(compiler, *flags, *contents)}.so"
    if not target.exists():
        compile_kernels(compiler, flags, target)
    return target
