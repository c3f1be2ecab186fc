"""Messages between the trainer, a supervisor and its workers: the first line, which a supervisor reads, and a body.

From the trainer: `[BEGIN, number, kind, fresh]` and the task; `[ANSWER, number, over]` and the reply; `[END, number]`;
`[END_ALL]`, which is answered with `[DONE]`. From a worker: `[kind, number, whether it is the last]` and the event. Its
supervisor adds the seconds of the environment's turns, and sends `FAILED`.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.errors import UserError
from lockstep.rl.conversations.chat import Reply
from lockstep.rl.environments.protocol import Example, Message
from lockstep.rl.grading.calling import Outcome, outcome_from
from lockstep.tool_call import ToolCall
from lockstep.workers import from_json, to_json

BEGIN, ANSWER, END, END_ALL, DONE = "begin", "answer", "end", "end all", "done"
"""Orders, and the answer to the last."""
REWARD, CONVERSE, GRADE = "reward", "converse", "grade"
"""Kinds of tasks: a chunk of jobs, a conversation, all conversations of a group."""
ASKED, ENDED, GRADED, REWARDED, FAILED = "asked", "ended", "graded", "rewarded", "failed"
EVENTS = {REWARD: (REWARDED,), CONVERSE: (ASKED, ENDED), GRADE: (GRADED, ENDED)}
"""What a worker may send about its task."""
MAX_BYTES = 2**25
"""Maximum size of a worker's message."""
STARTED = struct.Struct("<q")
"""The index of the job that a worker has started, in the memory that it shares with its supervisor."""


def message(*values: Any, body: bytes = b"") -> bytes:
    return to_json(values) + b"\n" + body


def header(data: bytes) -> Any:
    """The first line of a message. Raises Closed if it is not JSON."""
    return from_json(data[: data.find(b"\n")])


def body_of(data: bytes) -> Any:
    """The rest of a message. Raises Closed if it is not JSON."""
    return from_json(data[data.find(b"\n") + 1 :])


def failed(number: int, cause: str, problem: str = "", current: int = 0, seconds: float = 0.0) -> bytes:
    """A supervisor's message that it has ended a task, at which job and after how many seconds of its environment."""
    return message(FAILED, number, True, seconds, body=to_json([cause, problem, current]))


def fields_of(example: Example) -> dict[str, Any]:
    """An example's fields as plain data. Raises UserError if its metadata is not plain data."""
    fields: dict[str, Any] = {"prompt": example.prompt, "answer": example.answer, "id": example.id}
    if example.chat_template_kwargs:
        fields["chat_template_kwargs"] = dict(example.chat_template_kwargs)
    if not example.metadata:
        return fields
    metadata = dict(example.metadata)
    try:
        plain = json.loads(json.dumps(metadata)) == metadata
    except (TypeError, ValueError, RecursionError):
        plain = False
    if not plain:
        raise UserError(
            f"the metadata of example {example.name} does not survive a round trip through JSON, so it cannot be sent "
            "to a reward worker; use strings, numbers, lists and dicts with string keys, or set "
            'rewards.isolate = "never"'
        )
    return {**fields, "metadata": metadata}


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


def event_message(event: Event) -> bytes:
    """The event of a conversation, or of a group's `grade`, as a message."""
    match event:
        case ReplyRequest():
            return message(ASKED, event.number, False, body=to_json([event.request, event.messages]))
        case ConversationEnded():
            times = event.seconds, event.environment_seconds
            values = [event.messages, event.over, _outcome_data(event.outcome), *times]
            return message(ENDED, event.number, True, body=to_json(values))
        case GroupGraded():
            return message(GRADED, event.number, True, body=to_json(list(map(_outcome_data, event.outcomes))))


def event_from(kind: str, number: int, body: Any) -> Event:
    """The inverse of `event_message`. Raises TypeError, ValueError or OverflowError for anything else."""
    match kind, body:
        case "asked", [int(request), list(messages)]:
            return ReplyRequest(number, request, plain_messages(messages))
        case "ended", [list(messages), bool(over), outcome, dict(seconds), total]:
            environment_seconds = checked_seconds({"environment": total})["environment"]
            plain, by_tool = plain_messages(messages), checked_seconds(seconds)
            return ConversationEnded(number, plain, over, _outcome_from(outcome), by_tool, environment_seconds)
        case "graded", list(outcomes):
            return GroupGraded(number, [_outcome_from(outcome) for outcome in outcomes])
    raise TypeError(f"{body!r:.80} is not an event of a conversation")


def reply_from(values: dict[str, Any] | None) -> Reply | None:
    """A reply from its fields as plain data; None: the conversation is at a limit."""
    if values is None:
        return None
    return Reply(**values | {"tool_calls": tuple(ToolCall(**call) for call in values["tool_calls"])})


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
