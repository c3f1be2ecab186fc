"""Reads JSON files that are one array of objects item by item, without parsing the whole array at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from lockstep.errors import UserError

TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[][{},"]', re.DOTALL)
"""A whole string, a structural character, or the quote of an unterminated string, at which the search ends, so that it
takes linear time."""


def is_array(path: Path) -> bool:
    """Whether the first non-blank character of a file begins an array."""
    try:
        with path.open("rb") as file:
            return file.read(4096).lstrip().startswith(b"[")
    except OSError:
        return False


def items(path: Path, most_bytes: int) -> Iterator[bytes]:
    """Each item's text. Raises UserError for a file that is too large or an array that is not closed."""
    try:
        if path.stat().st_size > most_bytes:
            raise UserError(
                f"{path}: has {path.stat().st_size} bytes; an array can have at most {most_bytes}; "
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
        raise UserError(f"{path}: {problem}; is it complete? Write it again, or give a .jsonl file")
