"""Messages between conversations and the trainer as plain data, in one process or through pipes."""

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
class ReplyRequest:
    """A conversation waits for the model's reply."""

    number: int
    """Index of the conversation."""
    request: int
    """Index of this request within the conversation."""
    messages: list[Message]


@dataclass(frozen=True)
class ConversationEnded:
    """A conversation has ended."""

    number: int
    messages: list[Message]
    over: bool
    """Whether it ended at its limit of turns or tokens."""
    outcome: Outcome | None
    """None: `converse` returned no rewards."""
    seconds: dict[str, float]
    """Seconds per tool, by name."""
    environment_seconds: float = 0.0
    """Total of the environment's turns: from its start, and from each reply, to the next request or the end."""


@dataclass(frozen=True)
class GroupGraded:
    """A group has been graded."""

    number: int
    outcomes: list[Outcome | None]
    """One per episode; None: `grade` returned no rewards."""


@dataclass(frozen=True)
class ConversationRestarted:
    """A conversation starts again because its process died, possibly through another conversation's fault."""

    number: int


Event = ReplyRequest | ConversationEnded | GroupGraded


def event_data(event: Event) -> list[Any]:
    """The event as JSON-able data."""
    match event:
        case ReplyRequest():
            return ["asked", event.number, event.request, event.messages]
        case ConversationEnded():
            times = event.seconds, event.environment_seconds
            return ["ended", event.number, event.messages, event.over, _outcome_data(event.outcome), *times]
        case GroupGraded():
            return ["graded", event.number, [_outcome_data(outcome) for outcome in event.outcomes]]


def event_from(data: Any, number: int | None = None) -> Event:
    """The inverse of `event_data`. Raises TypeError or ValueError for other data or, if given, another `number`."""
    match data:
        case [_, int(actual), *_] if number is not None and actual != number:
            raise ValueError(f"an event of conversation {actual}")
        case ["asked", int(number), int(request), list(messages)]:
            return ReplyRequest(number, request, plain_messages(messages))
        case ["ended", int(number), list(messages), bool(over), outcome, dict(seconds), total]:
            environment_seconds = checked_seconds({"environment": total})["environment"]
            plain, by_tool = plain_messages(messages), checked_seconds(seconds)
            return ConversationEnded(number, plain, over, _outcome_from(outcome), by_tool, environment_seconds)
        case ["graded", int(number), list(outcomes)]:
            return GroupGraded(number, [_outcome_from(outcome) for outcome in outcomes])
    raise TypeError(f"{data!r:.80} is not an event of a conversation")


def reply_data(reply: Reply | None) -> list[Any] | None:
    """The reply as JSON-able data; None: the conversation is at a limit."""
    if reply is None:
        return None
    calls = [[call.name, dict(call.arguments), call.problem] for call in reply.tool_calls]
    tokens = [reply.prompt_tokens, reply.completion_tokens]
    return [reply.text, reply.finish_reason, calls, *tokens, reply.reasoning, dict(reply.message), reply.content]


def reply_from(data: Any) -> Reply | None:
    """The inverse of `reply_data`."""
    if data is None:
        return None
    text, finish_reason, calls, *others = data
    return Reply(text, finish_reason, tuple(ToolCall(*call) for call in calls), *others)


def episode_data(episode: Episode) -> list[Any]:
    """The episode as JSON-able data."""
    return [list(episode.messages), episode.rewards, episode.over]


def plain_messages(messages: Sequence[Any]) -> list[Message]:
    """Messages as JSON-able data, with lone surrogates replaced. Raises TypeError or ValueError if that fails."""
    plain: list[Message] = json.loads(json.dumps(list(messages), ensure_ascii=False).encode(errors="replace"))
    for message in plain:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise TypeError(f"a message must be a dict with a role: {message!r:.80}")
    return plain


def checked_seconds(seconds: Any) -> dict[str, float]:
    """Durations by name. Raises TypeError, ValueError or OverflowError if they are invalid."""
    by_name = dict(seconds)
    for name, value in by_name.items():
        if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name!r:.80}: {value!r:.80}")
        if not 0 <= value < math.inf:
            raise ValueError(f"{name!r:.80}: {value!r:.80}")
    return {name: float(value) for name, value in by_name.items()}


def _outcome_data(outcome: Outcome | None) -> list[Any] | None:
    return None if outcome is None else [outcome.rewards, outcome.cause, outcome.message]


def _outcome_from(data: Any) -> Outcome | None:
    return None if data is None else outcome_from(data)
