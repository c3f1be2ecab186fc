"""A run's rollouts as its report shows them."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

ABSENT: dict[str, Any] = {"answer": "", "rewards": {}, "reward": 0.0, "advantage": 0.0, "finish_reason": ""}
"""Defaults of missing fields: answers to held-out conversations in fine-tuning, for example, have no advantage."""


def readable_rollouts(path: Path) -> list[dict[str, Any]]:
    """The rollouts of a file, without a last line that a killed run has not finished."""
    rollouts = []
    for line in path.read_bytes().splitlines():
        with suppress(ValueError):
            rollouts.append(ABSENT | json.loads(line))
    return rollouts
