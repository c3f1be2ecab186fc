"""Messages between a conversation and the trainer, wherever each of them runs: plain data."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.rl.conversations.chat import Reply
from lockstep.rl.conversations.protocol import Episode
from lockstep.rl.environments.protocol import Message
from lockstep.rl.grading.calling import Outcome, outcome_from
from lockstep.tool_call import ToolCall


@dataclass(frozen=True)
class Asked:
    """A conversation waits for the model."""

    number: int
    ask: int
    """Index of this request within the conversation."""
    messages: list[Message]


@dataclass(frozen=True)
class Ended:
    """A conversation is over."""

    number: int
    messages: list[Message]
    over: bool
    outcome: Outcome | None
    """None: `converse` returned no rewards."""
    seconds: dict[str, float]
    """Seconds that each tool took, by name."""
    environment_seconds: float = 0.0
    """Total of the environment's turns: from its start, and from each reply, to the next request or the end."""


@dataclass(frozen=True)
class Graded:
    """A group is graded."""

    number: int
    outcomes: list[Outcome | None]
    """One per episode; None: `grade` returned no rewards."""


@dataclass(frozen=True)
class Again:
    """A conversation is restarted: its process is gone, which may not be its own fault."""

    number: int


Said = Asked | Ended | Graded


def data_of(said: Said) -> list[Any]:
    """As JSON-able data."""
    match said:
        case Asked():
            return ["asked", said.number, said.ask, said.messages]
        case Ended():
            outcome = _outcome_data(said.outcome)
            return ["ended", said.number, said.messages, said.over, outcome, said.seconds, said.environment_seconds]
        case Graded():
            return ["graded", said.number, [_outcome_data(outcome) for outcome in said.outcomes]]


def said_of(data: Any, number: int | None = None) -> Said:
    """The inverse of `data_of`. Raises TypeError or ValueError for anything else, or if it is not about `number`."""
    match data:
        case [_, int(about), *_] if number is not None and about != number:
            raise ValueError(f"an answer about {about}")
        case ["asked", int(number), int(ask), list(messages)]:
            return Asked(number, ask, plain(messages))
        case ["ended", int(number), list(messages), bool(over), outcome, dict(seconds), took]:
            own = times({"environment": took})["environment"]
            return Ended(number, plain(messages), over, _outcome(outcome), times(seconds), own)
        case ["graded", int(number), list(outcomes)]:
            return Graded(number, [_outcome(outcome) for outcome in outcomes])
    raise TypeError(f"{data!r:.80} is not a message of a conversation")


def reply_data(reply: Reply | None) -> list[Any] | None:
    """As JSON-able data; None: the conversation is at a limit."""
    if reply is None:
        return None
    calls = [[call.name, dict(call.arguments), call.problem] for call in reply.tool_calls]
    tokens = [reply.prompt_tokens, reply.completion_tokens]
    return [reply.text, reply.finish_reason, calls, *tokens, reply.reasoning, dict(reply.message), reply.content]


def reply_of(data: Any) -> Reply | None:
    """The inverse of `reply_data`."""
    if data is None:
        return None
    text, finish_reason, calls, *others = data
    return Reply(text, finish_reason, tuple(ToolCall(*call) for call in calls), *others)


def episode_data(episode: Episode) -> list[Any]:
    """As JSON-able data."""
    return [list(episode.messages), episode.rewards, episode.over]


def plain(messages: Sequence[Any]) -> list[Message]:
    """Messages as JSON-able data, with lone surrogates replaced. Raises TypeError or ValueError if that fails."""
    sent: list[Message] = json.loads(json.dumps(list(messages), ensure_ascii=False).encode(errors="replace"))
    for message in sent:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise TypeError(f"a message must be a dict with a role: {message!r:.80}")
    return sent


def times(seconds: Any) -> dict[str, float]:
    """Times by name. Raises TypeError, ValueError or OverflowError if they are not."""
    by_name = dict(seconds)
    for name, value in by_name.items():
        if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name!r:.80}: {value!r:.80}")
        if not 0 <= value < math.inf:
            raise ValueError(f"{name!r:.80}: {value!r:.80}")
    return {name: float(value) for name, value in by_name.items()}


def _outcome_data(outcome: Outcome | None) -> list[Any] | None:
    return None if outcome is None else [outcome.rewards, outcome.cause, outcome.message]


def _outcome(data: Any) -> Outcome | None:
    return None if data is None else outcome_from(data)
