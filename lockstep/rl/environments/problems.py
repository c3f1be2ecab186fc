"""Problems from JSONL files: where a split lies, and what a line must have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import UserError, closest

FILES = {"train": ("train.jsonl",), "validation": ("validation.jsonl", "test.jsonl")}
HELD_OUT = 10
"""Of a single file every tenth line is for validation."""

KINDS = {list: "a list", dict: "an object", bool: "true or false", type(None): "null"}
"""What JSON has besides texts and numbers."""


def read_problems(data: str, split: str, skip_bad_lines: bool, needs: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(`file:line`, object) of each problem of a split.

    `data` is a folder with `train.jsonl` and `validation.jsonl` or `test.jsonl`, or one `.jsonl` file, of whose lines
    every tenth is for validation. Raises UserError for a missing file, naming what lines need, and as `read_jsonl`.
    """
    from lockstep.data.records import read_jsonl  # which imports torch: a reward's worker need not

    place = Path(data)
    files = [place / name for name in FILES[split]] if not place.is_file() else [place]
    path = next((file for file in files if file.is_file()), None)
    if not data or path is None:
        missing = f"{data}: no {' or '.join(FILES[split])} there" if data else "the environment needs data"
        raise UserError(
            f"{missing}; give --data a folder with train.jsonl and validation.jsonl (or test.jsonl), or one .jsonl "
            f"file, of lines with {needs}"
        )
    number = 0
    for number, values in read_jsonl(path, skip_bad_lines):
        if path != place or (number % HELD_OUT == 0) == (split == "validation"):
            yield f"{path}:{number}", values
    if path == place and split == "validation" and number < HELD_OUT:
        lines = "1 line" if number == 1 else f"{number} lines"
        raise UserError(f"{path} has {lines}; every tenth is used for validation: give {HELD_OUT} or more")


def text_of(values: dict[str, Any], keys: Sequence[str]) -> str | None:
    """The text under the first of the keys that has one; None where none has. A number counts as its text."""
    for key in keys:
        value = values.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
        if isinstance(value, str) and value.strip():
            return value
    return None


def needs_text(where: str, values: dict[str, Any], keys: Sequence[str]) -> UserError:
    """The error for a line that has no text under any of the keys."""
    if there := next((key for key in keys if key in values), None):
        value = values[there]
        kind = "empty" if isinstance(value, str) or value == [] else f"{KINDS[type(value)]}, not a text"
        return UserError(f"{where}: `{there}` is {kind}; fix it or use --skip-bad-lines")
    hint = next((h for key in keys if (h := closest(key, values))), "")
    names = " or ".join(f"`{key}`" for key in keys)
    return UserError(f"{where}: needs a text as {names}.{hint} Fix it or use --skip-bad-lines")
