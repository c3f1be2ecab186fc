"""The calls of a conversation and their results, in an order that every chat template shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from lockstep.generate.server.api_error import ApiError
from lockstep.generate.server.protocol import Message


def ordered(messages: Sequence[Message], field: str) -> list[Message]:
    """The messages, with the results that follow a message's calls in the order of the calls: templates do not show
    ids. Raises ApiError for a result that answers no call."""
    _check_results(messages, field)
    whole: list[Message] = []
    for message, results in _turns(messages):
        place = {call.id: number for number, call in enumerate(message.tool_calls or ())}
        if all(result.tool_call_id in place for result in results):
            results.sort(key=lambda result: place[result.tool_call_id])
        whole += (message, *results)
    return whole


def one_call_each(messages: Sequence[Message]) -> list[Message]:
    """The messages of a conversation in order, with each call and its result as messages of their own."""
    whole: list[Message] = []
    for message, results in _turns(messages):
        left = list(results)
        for number, call in enumerate(message.tool_calls or ()):
            # The text and the reasoning were written before the first call.
            kept = message.model_copy() if number == 0 else Message(role="assistant")
            kept.tool_calls = [call]
            whole.append(kept)
            if left and left[0].tool_call_id in (call.id, None):
                whole.append(left.pop(0))
        whole += left if message.tool_calls else (message, *left)
    return whole


def require_results(messages: Sequence[Message], field: str) -> None:
    """Raises ApiError for a call without a result right after it, and as `ordered`."""
    _check_results(messages, field)
    for message, results in _turns(messages):
        answered = {result.tool_call_id for result in results}
        if missing := next((call for call in message.tool_calls or () if call.id not in answered), None):
            text = f"the call {(missing.id or '')[:80]!r} has no result right after it; send one for every call"
            raise ApiError(400, f"{field}: {text}", field)


def _turns(messages: Sequence[Message]) -> Iterator[tuple[Message, list[Message]]]:
    """Each message that is no result of the calls before it, and the results that follow its calls."""
    position = 0
    while position < len(messages):
        message, end = messages[position], position + 1
        while message.tool_calls and end < len(messages) and messages[end].role == "tool":
            end += 1
        yield message, list(messages[position + 1 : end])
        position = end


def _check_results(messages: Sequence[Message], field: str) -> None:
    """A result without an id answers any call before it, and any result one without an id."""
    unanswered: Counter[str | None] = Counter()
    for message in messages:
        unanswered.update(call.id for call in message.tool_calls or ())
        if message.role != "tool":
            continue
        answered = message.tool_call_id
        if answered not in unanswered:
            answered = next(iter(unanswered), "") if answered is None else None
        if answered not in unanswered:
            result = "without an id" if message.tool_call_id is None else f"of the call {message.tool_call_id[:80]!r}"
            text = f"a tool's result {result} answers no call before it, or one that another result has answered"
            raise ApiError(400, f"{field}: {text}", field)
        unanswered[answered] -= 1
        if not unanswered[answered]:
            del unanswered[answered]
