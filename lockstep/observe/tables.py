"""Tables of text and numbers for the trackers."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass

Cell = int | float | str


@dataclass(frozen=True)
class Table:
    """Rows of cells under named columns; a column's cells have one type."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def markdown(self) -> str:
        """The table in Markdown, with HTML and Markdown in its text escaped."""
        rule = "|".join("---" for _ in self.columns)
        lines = ["|".join(map(_cell, self.columns)), rule, *("|".join(map(_cell, row)) for row in self.rows)]
        return "\n".join(f"|{line}|" for line in lines)


def _cell(value: Cell) -> str:
    if not isinstance(value, str):
        return f"{value:.6g}" if isinstance(value, float) else str(value)
    # Punctuation as character references has no meaning in Markdown; a row must be one line.
    escaped = "".join(f"&#{ord(c)};" if c in string.punctuation else c for c in value)
    return "<br>".join(escaped.splitlines()) or " "
