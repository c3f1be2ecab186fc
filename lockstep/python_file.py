"""Imports a user's Python file, and names its lines in errors."""

from __future__ import annotations

import importlib.util
import sys
import traceback
import zlib
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from lockstep.errors import UserError


class _Uncached(SourceFileLoader):
    """Compiles the file at each import: Python's cache would serve an edited file of the same length and second."""

    def get_code(self, fullname: str) -> CodeType:
        self.source = self.get_data(self.path)
        code: CodeType = self.source_to_code(self.source, self.path)
        return code


def import_file(file: Path, kind: str, form: str) -> ModuleType:
    """The module that a file is. kind: of what, for the module's name. form: how to name it, such as `FILE.py:Class`.

    Raises UserError, naming the line, for a file that does not exist or cannot be imported.
    """
    if not file.is_file():
        raise UserError(f"{file}: no such file; give the {kind} as {form}")
    # The module's name includes the path, as two folders can have files of the same name.
    name = f"lockstep_{kind}_{file.stem}_{zlib.crc32(str(file.resolve()).encode()):08x}"
    loader = _Uncached(name, str(file))
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    if spec is None or file.suffix != ".py":
        raise UserError(f"{file}: not a Python file; give the {kind} as {form}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(spec.name, None)
        raise UserError(f"{user_line(error, file)}: does not import ({type(error).__name__}: {error})") from error
    return module


def source_of(module: ModuleType) -> bytes:
    """The bytes that `import_file` executed, whatever the file contains now."""
    assert module.__spec__ is not None and isinstance(module.__spec__.loader, _Uncached)
    return module.__spec__.loader.source


def user_line(error: BaseException, file: Path | None = None) -> str:
    """`file:line` of an error: the innermost frame in `file` if its traceback has any, else the innermost of all."""
    frames = traceback.extract_tb(error.__traceback__)
    in_file = [f for f in frames if file is not None and Path(f.filename).resolve() == file.resolve()]
    # A file with a syntax error has no frame; a file that calls `eval` on invalid text has one.
    if not in_file and isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frame = (in_file or list(frames))[-1]
    return f"{frame.filename}:{frame.lineno}"
