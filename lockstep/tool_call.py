"""A call of a tool, as a model wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote in a reply."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""
    """Why it cannot be parsed, for the model; empty if it can."""
