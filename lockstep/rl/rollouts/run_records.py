"""What a run writes about its rollouts: one file per step, what became of the prompts, and samples for the trackers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from lockstep.observe import Table, append_step
from lockstep.rl.rollouts.ledger import Ledger
from lockstep.rl.rollouts.records import Rollout, episodes_of, write_rollouts
from lockstep.run.session import Session

SAMPLES = 8
LONGEST = 10_000
"""Characters of a prompt or completion; `rollouts/` has all of it."""


class RunRecords:
    """Writes into the run's folder and to its trackers, on rank 0. All ranks call its methods."""

    def __init__(self, session: Session, whole_routes: bool):
        """whole_routes: as for `write_rollouts`."""
        self._session, self._whole_routes = session, whole_routes

    def write(self, step: int, groups: Ledger) -> None:
        """A step's rollouts and prompts. Raises RunStopped if they cannot be written."""
        world, run, observer = self._session.world, self._session.run, self._session.observer
        world.on_main(partial(write_rollouts, run.rollouts_path(step), groups.rollouts, self._whole_routes))
        world.on_main(partial(append_step, run.prompts, step, groups.places()))
        if observer.samples_due(step):
            observer.write_samples(step, "rollout/samples", samples_of(step, groups.trained))

    def write_validation(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """A validation's rollouts, after `step`. Raises RunStopped if they cannot be written."""
        session = self._session
        session.world.on_main(partial(write_rollouts, session.run.validation_path(step), rollouts))
        session.observer.write_samples(step, "validation/samples", samples_of(step, rollouts, advantages=False))


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
