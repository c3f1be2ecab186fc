"""The parts of a run's rollouts that can be displayed, even if their files are damaged."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

PER_TOKEN = ("token_advantages", "trainer_log_probs", "entropies", "reference_log_probs", "teacher_log_probs")
"""Optional values per sampled token."""
ABSENT: dict[str, Any] = {"answer": "", "rewards": {}, "reward": 0.0, "advantage": 0.0, "finish_reason": ""}
"""Defaults of missing fields: answers to held-out conversations in fine-tuning, for example, have no advantage."""


def readable_rollouts(path: Path) -> list[dict[str, Any]]:
    """The rollouts of a file, without damaged lines and damaged values per token."""
    rollouts = []
    with suppress(OSError):
        for text in path.read_bytes().splitlines():
            with suppress(ValueError, RecursionError):
                rollout = json.loads(text.decode())
                if isinstance(rollout, dict) and _can_be_shown(rollout := ABSENT | rollout):
                    rollouts.append(_without_damaged_values(rollout))
    return rollouts


def is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


def _can_be_shown(rollout: dict[str, Any]) -> bool:
    """Whether it has the fields that every table and every ordering of rollouts needs."""
    return (
        type(rollout.get("group")) is int
        and all(is_number(rollout.get(name)) for name in ("reward", "advantage"))
        and all(isinstance(rollout.get(name), str) for name in ("prompt", "completion", "answer", "finish_reason"))
        and isinstance(rewards := rollout.get("rewards"), dict)
        and all(map(is_number, rewards.values()))
    )


def _without_damaged_values(rollout: dict[str, Any]) -> dict[str, Any]:
    numbers: Any = rollout.get("log_probs")
    tokens: Any = rollout.get("token_ids")
    sampled = rollout.get("sampled", [])
    bad = {name for name in ("dropped", "failure") if not isinstance(rollout.get(name, ""), str)}
    if not _are_numbers(numbers) or not isinstance(tokens, list) or any(type(token) is not int for token in tokens):
        bad |= {"log_probs", "token_ids", *PER_TOKEN}
    elif "sampled" in rollout and not (
        isinstance(sampled, list) and len(sampled) == len(tokens) and all(type(flag) is int for flag in sampled)
    ):
        bad |= {"token_ids", "sampled"}
    else:
        bad |= {
            name
            for name in PER_TOKEN
            if name in rollout and not (_are_numbers(rollout[name]) and len(rollout[name]) == len(numbers))
        }
    return {name: value for name, value in rollout.items() if name not in bad}


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(map(is_number, values))
