"""What others wrote, made fit for a terminal."""

from __future__ import annotations

import re

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Control characters but tabs and line feeds as `\\x1b`: they could rewrite what a terminal shows."""
    return CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
