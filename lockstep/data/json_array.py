"""JSON files that are one array of objects: its items one by one, without all of them as values in memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from lockstep.errors import UserError

TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[][{},"]', re.DOTALL)
"""A string, in which nothing counts, what begins, separates or ends values, or the quote of a string without an end, at
which the search ends: so it takes linear time."""


def is_array(path: Path) -> bool:
    """Whether the first character of a file that is not white space begins an array."""
    try:
        with path.open("rb") as file:
            return file.read(4096).lstrip().startswith(b"[")
    except OSError:
        return False


def items(path: Path, most_bytes: int) -> Iterator[bytes]:
    """The text of each item of the array that the file is. Raises UserError for a larger file and for half an array."""
    try:
        if path.stat().st_size > most_bytes:
            raise UserError(
                f"{path}: has {path.stat().st_size} bytes, more than the {most_bytes} of an array that is read; "
                "write its items to a .jsonl file, one per line"
            )
        text = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); fix it or leave it out") from error
    depth, start, commas = 0, 0, 0
    for match in TOKEN.finditer(text):
        token = match[0]
        if token in (b"[", b"{"):
            depth += 1
            start = match.end() if depth == 1 else start
        elif token in (b"]", b"}"):
            depth -= 1
        if (token == b"," and depth == 1) or (depth == 0 and token == b"]"):
            if commas or depth or text[start : match.start()].strip():
                yield text[start : match.start()]
            start, commas = match.end(), commas + 1
        if depth == 0 or token == b'"':
            break
    if depth or text[start:].strip():
        problem = "text follows the array" if not depth else "the array is not closed"
        raise UserError(f"{path}: {problem}; is it whole? Write it again, or give a .jsonl file")
