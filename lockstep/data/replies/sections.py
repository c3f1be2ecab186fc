"""What each part of a reply is: reasoning, content, calls, or structure that is not shown."""

from __future__ import annotations

from typing import Literal, NamedTuple

Section = Literal["reasoning", "content", "call", "structure"]


class Piece(NamedTuple):
    """Text of a section."""

    section: Section
    text: str
    sampled: bool = True
    """False for a line break between two messages, which no token has."""
