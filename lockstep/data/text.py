"""Documents from text and JSONL files."""

from __future__ import annotations

import glob
import json
import string
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lockstep.errors import UserError


class TextSource:
    """Documents of a file, a folder or a glob, in the order of their names; iterates over strings.

    A `.jsonl` file gives a document a line: `template` with the line's values in place of the keys in braces. Any other
    file is one document; a folder's hidden files and folders are left out. Empty `data` is the Python standard
    library's own source, which every machine has. `skipped` counts the malformed lines that `skip_bad_lines` passed
    over in the latest iteration.

    Raises UserError where nothing matches or the template is no use, and, while iterating, for a bad line (file and
    line number) or a file that is no text.
    """

    def __init__(self, data: str = "", template: str = "{text}", skip_bad_lines: bool = False):
        self.template = template
        self.skip_bad_lines = skip_bad_lines
        self.skipped = 0
        self.files = _files(data)
        try:
            self.keys = [key for _, key, _, _ in string.Formatter().parse(template) if key is not None]
        except ValueError as error:
            raise UserError(
                f"template {template!r}: {error}; write keys as {{key}}, and a brace itself twice"
            ) from error
        if not self.keys:
            raise UserError(f'template {template!r} names no key; write keys in braces, as in "{{text}}"')

    def __iter__(self) -> Iterator[str]:
        self.skipped = 0
        for path in self.files:
            if path.suffix == ".jsonl":
                yield from self._lines(path)
            else:
                yield _text(path)

    def _lines(self, path: Path) -> Iterator[str]:
        for number, values in read_jsonl(path, self.skip_bad_lines, self._count):
            bad = [key for key in self.keys if not isinstance(values.get(key), str)]
            if not bad:
                yield self.template.format_map(values)
            elif self.skip_bad_lines:
                self._count()
            else:
                raise UserError(
                    f"{path}:{number}: key {bad[0]!r} is not a string; name the line's keys in --template "
                    f"(here: {', '.join(values)}), or use --skip-bad-lines"
                )

    def _count(self) -> None:
        self.skipped += 1


def read_jsonl(
    path: Path, skip_bad_lines: bool = False, on_skip: Callable[[], None] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of each line that is not blank.

    Raises UserError with file and line for one that is no JSON object, unless those are skipped; each skipped line
    calls `on_skip`.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    with file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
                problem = "" if isinstance(values, dict) else f"a {type(values).__name__}, not an object"
                if b"\\ud" in line.lower():
                    # JSON can escape half a surrogate pair, which no tokenizer takes: it has no UTF-8.
                    json.dumps(values, ensure_ascii=False).encode()
            except ValueError as error:
                problem = str(error)
            except RecursionError:
                problem = "nested too deep"
            if not problem:
                yield number, values
            elif not skip_bad_lines:
                raise UserError(f"{path}:{number}: not a JSON object ({problem}); mend it or use --skip-bad-lines")
            elif on_skip is not None:
                on_skip()


def _files(data: str) -> list[Path]:
    if not data:
        return _standard_library()
    path = Path(data)
    if path.is_dir():
        files = [p for p in sorted(path.rglob("*")) if p.is_file() and not _hidden(p.relative_to(path))]
    elif path.is_file():
        files = [path]
    else:
        files = [Path(p) for p in sorted(glob.glob(data, recursive=True)) if Path(p).is_file()]
    if not files:
        raise UserError(f"{data}: no such file, folder or match; give text or .jsonl files with --data")
    return files


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    if "\0" in text:
        raise UserError(
            f'{path}: holds NUL bytes, so it is no UTF-8 text; give a glob, such as --data "folder/**/*.txt"'
        )
    return text


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    files = [p for p in sorted(root.rglob("*.py")) if not left_out.intersection(p.relative_to(root).parts)]
    if not files:
        raise UserError(f"{root}: the standard library's source is not on this machine; give text with --data")
    return files
