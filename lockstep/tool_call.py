"""A tool call of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """A tool call that a model wrote in a reply."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""
    """Why it cannot be parsed, as feedback to the model; empty if it can."""
