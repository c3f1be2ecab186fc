"""A few of a step's completions, as the trackers show them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.observe import Table
from lockstep.rl.rollouts.records import Rollout, episodes_of

SAMPLES = 8
LONGEST = 10_000
"""Characters of a prompt or completion; `rollouts/` has all of it."""


def samples_of(step: int, rollouts: Sequence[Rollout], advantages: bool = True) -> Table:
    """At most `SAMPLES` completions, spread evenly over the step's prompts, with rewards and, in training, advantages.

    A conversation is one completion: all of its messages.
    """
    episodes = [rows[-1] for rows in episodes_of(rollouts)]
    count = min(SAMPLES, len(episodes))
    chosen = [episodes[index * len(episodes) // count] for index in range(count)]
    rows = []
    for rollout in chosen:
        texts = _shortened(rollout.example.text), _shortened(_completion(rollout))
        scores = rollout.scores
        numbers = (float(scores.reward), float(scores.advantage)) if advantages else (float(scores.reward),)
        rows.append((step, *texts, *numbers))
    columns = ("step", "prompt", "completion", "reward") + (("advantage",) if advantages else ())
    return Table(columns, rows)


def _completion(rollout: Rollout) -> str:
    if rollout.conversation is None:
        return rollout.completion
    return "\n".join(map(_said, rollout.conversation.messages))


def _said(message: Mapping[str, Any]) -> str:
    """`assistant: text`; what is not text, such as a tool call, as JSON."""
    content = message.get("content")
    others = {name: value for name, value in message.items() if name not in ("role", "content") and value}
    parts = [content if isinstance(content, str) else "" if content is None else json.dumps(content)]
    parts += [json.dumps(others)] if others else []
    return f"{message.get('role', '')}: " + " ".join(filter(None, parts))


def _shortened(text: str) -> str:
    # A lone surrogate, which a template or an environment can leave, is no text to a tracker.
    text = text.encode(errors="replace").decode()
    return text if len(text) <= LONGEST else text[:LONGEST] + "…"
