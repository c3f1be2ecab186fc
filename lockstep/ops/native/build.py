"""Locates the compiled kernels: in the wheel, or compiled once into the user's cache folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

from lockstep.cache import cache_folder, fingerprint, require_private
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
    """The shared library for these instructions: the wheel's, or one compiled from this source, now if necessary.

    If that fails, a cached one that another compiler built from this source. Raises CompilerMissing with the reason,
    and UnsafeCache for a library that other users could have written.
    """
    shipped = SHIPPED / file_name(instructions)
    if shipped.is_file():
        return shipped
    flags = [*FLAGS, *instructions.flags]
    contents = [source.read_bytes() for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")])]
    name = f"kernels-{instructions.name}-{fingerprint(*flags, *contents)}"
    compiler = find_compiler()
    try:
        if not compiler:
            raise CompilerMissing("no C++ compiler was found; install g++ or set CXX")
        return _compiled(compiler, flags, cache_folder() / f"{name}-{fingerprint(compiler)}.so")
    except CompilerMissing:
        for cached in sorted(cache_folder().glob(f"{name}-*.so")):
            if _is_intact(cached):
                return cached
        raise


def _compiled(compiler: str, flags: list[str], target: Path) -> Path:
    """Compiles `target` if it does not exist, and returns it."""
    if not _is_intact(target):
        try:
            compile_kernels(compiler, flags, target, umask=0o077)
            _digest_file(target).unlink(missing_ok=True)
            _digest_file(target).touch(mode=0o600)
            _digest_file(target).write_text(_digest(target))
        except OSError as error:  # a full disk
            raise CompilerMissing(f"they cannot be cached in {target.parent}: {error.strerror or error}") from error
    return target


def _is_intact(library: Path) -> bool:
    """Whether the library is intact: loading a damaged one would crash the process without an error message.

    Raises UnsafeCache if other users could have written it or its digest.
    """
    for path in (library, _digest_file(library)):
        if path.exists():
            require_private(path)
    try:
        return _digest_file(library).read_text() == _digest(library)
    except OSError:
        return False


def _digest_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _digest(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()
