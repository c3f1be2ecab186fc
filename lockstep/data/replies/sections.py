"""The sections of a reply: reasoning, content, calls, and structure that is not shown."""

from __future__ import annotations

from typing import Literal, NamedTuple

Section = Literal["reasoning", "content", "call", "structure"]


class Piece(NamedTuple):
    """Text of a section."""

    section: Section
    text: str
    sampled: bool = True
    """False for a line break between two messages, which is not from a token."""
