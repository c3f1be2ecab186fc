"""Rollouts and model shapes as plain data for messages between processes; the example is left out, as all have it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from lockstep.model import ModelConfig
from lockstep.rl.environments.protocol import Example
from lockstep.rl.grading.calling import Outcome
from lockstep.rl.rollouts.records import Conversation, Rollout, Scores

SCORES = [field.name for field in dataclasses.fields(Scores)]
SAMPLE = [f.name for f in dataclasses.fields(Rollout) if f.name not in ("example", "conversation", "scores")]


def plain_shape(shape: ModelConfig) -> dict[str, Any]:
    """A model's shape as it comes back from JSON: with lists in place of tuples, without the unused pad token."""
    values = dataclasses.asdict(shape)
    del values["pad_token_id"]
    return dict(json.loads(json.dumps(values)))


def plain_rollouts(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """JSON-able. The rows of a conversation share it, and still do after `rollouts_of`."""
    conversations: dict[int, Conversation] = {
        id(rollout.conversation): rollout.conversation for rollout in rollouts if rollout.conversation is not None
    }
    places = {identity: place for place, identity in enumerate(conversations)}
    return {
        "rollouts": [
            {name: getattr(rollout, name) for name in SAMPLE} | {name: getattr(rollout.scores, name) for name in SCORES}
            for rollout in rollouts
        ],
        "conversations": [dataclasses.asdict(conversation) for conversation in conversations.values()],
        "held_in": [places.get(id(rollout.conversation)) for rollout in rollouts],
    }


def rollouts_of(plain: dict[str, Any], examples: Sequence[Example]) -> list[Rollout]:
    """The inverse of `plain_rollouts`; a rollout's group is the number of its example."""
    conversations = [
        Conversation(**{**fields, "outcome": fields["outcome"] and Outcome(**fields["outcome"])})
        for fields in plain["conversations"]
    ]
    return [
        Rollout(
            example=examples[fields["group"]],
            conversation=None if place is None else conversations[place],
            scores=Scores(**{name: fields[name] for name in SCORES}),
            **{name: fields[name] for name in SAMPLE},
        )
        for fields, place in zip(plain["rollouts"], plain["held_in"])
    ]
