"""Text from elsewhere, made safe to show on a terminal."""

from __future__ import annotations

import re

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def in_encoding(text: str, encoding: str | None) -> str:
    """What a terminal with that encoding can show: +/- if it lacks ±, and ? for anything else it lacks."""
    name = encoding or "utf-8"
    try:
        text.encode(name)
    except UnicodeEncodeError:
        return text.replace("±", "+/-").encode(name, "replace").decode(name)
    return text


def printable(text: str) -> str:
    """Control characters except tabs and line feeds as `\\x1b`: they could rewrite what a terminal shows."""
    return CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
