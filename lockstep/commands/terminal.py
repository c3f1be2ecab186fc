"""Makes untrusted text safe to print on a terminal."""

from __future__ import annotations

import re

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def in_encoding(text: str, encoding: str | None) -> str:
    """Text that a terminal with that encoding can show: with +/- for ±, and ? for other missing characters."""
    name = encoding or "utf-8"
    try:
        text.encode(name)
    except UnicodeEncodeError:
        return text.replace("±", "+/-").encode(name, "replace").decode(name)
    return text


def printable(text: str) -> str:
    """Escapes control characters except tabs and line feeds, as `\\x1b`: they could rewrite a terminal's contents."""
    return CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
