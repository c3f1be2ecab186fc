"""Calls while they are sampled: the name as soon as it is known, then the JSON of the arguments in fragments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lockstep.data.replies.call_json import GrowingObject
from lockstep.data.replies.calls import CallText, WrittenCall, calls_in, closes_tagged, head, next_call
from lockstep.data.replies.formats import ToolFormat
from lockstep.data.replies.tagged_calls import Parameters


class CallPart(NamedTuple):
    """A part of a call: the first one has the name, and all of a call's fragments joined are its arguments' JSON."""

    call: int
    """Which of the reply's calls, without those that cannot be parsed; -1: of none."""
    name: str = ""
    arguments: str = ""
    unread: str = ""
    """The text of a call that cannot be parsed, if no part of it was returned before."""


class GrowingCall:
    """A call whose arguments are a JSON object in the text."""

    def __init__(self, index: int, name: str):
        self.index, self.name, self.object = index, name, GrowingObject()
        self._begun = False

    def take(self, text: str) -> Iterator[CallPart]:
        """The part that a further text of the arguments is."""
        fragment = self.object.take(text)
        if fragment or not self._begun:
            yield CallPart(self.index, "" if self._begun else self.name, fragment)
        self._begun = True


class GrowingCalls:
    """The calls of a reply, given the text from the first call on. Their parts joined equal what `calls_in` returns for
    the whole text, except for calls that turn out not to be parseable after a part of them was returned."""

    def __init__(self, format: ToolFormat, parameters: Parameters):
        self._format, self._parameters = format, parameters
        self._text = ""
        self._marks: list[tuple[int, str]] = []
        self._place = 0
        """Where the first call begins that is not complete."""
        self._next = 0
        self._open: GrowingCall | None = None

    def take(self, text: str, mark: str = "") -> Iterator[CallPart]:
        """The parts that this text, or mark, completes."""
        before = len(self._text)
        if mark:
            self._marks.append((before, mark))
        self._text += text
        if self._open is not None:
            yield from self._open.take(text)
        progress = True
        while progress:
            yield from self._begin()
            progress = False
            if self._may_be_complete(mark) and (found := self._complete()):
                yield from self._end(found)
                progress = True

    def finish(self) -> Iterator[CallPart]:
        """The remaining parts, once the reply has ended."""
        for call in calls_in(self.whole()):
            if call.begin >= self._place:
                yield from self._end(call)

    def whole(self) -> CallText:
        """All of the text."""
        return CallText(self._text, self._marks, self._format, self._parameters)

    def _begin(self) -> Iterator[CallPart]:
        if self._open is None and (found := head(self.whole(), self._place)):
            name, start = found
            self._open = GrowingCall(self._next, name)
            self._next += 1
            yield from self._open.take(self._text[start:])

    def _may_be_complete(self, mark: str) -> bool:
        if self._format.closes:
            if mark != self._format.closes:
                return False
            if self._format.family in ("glm", "qwen3_xml"):
                body = self._text[self._place : len(self._text) - len(mark)]
                return closes_tagged(body, self._format)
            return self._open is None or not self._open.object.in_string
        return self._open is not None and self._open.object.ended

    def _complete(self) -> WrittenCall | None:
        found = next_call(self.whole(), self._place)
        if found is None or self._format.closes:
            return found
        # Without a closing mark, what follows may still show that it is no call.
        follows = self._format.family == "mistral" or self._text[: found.end].rstrip().endswith(";")
        return found if follows and not found.call.problem else None

    def _end(self, found: WrittenCall) -> Iterator[CallPart]:
        self._place = found.end
        begun, self._open = self._open, None
        if begun is not None:
            return
        if found.call.problem:
            yield CallPart(-1, unread=(found.text or self._text[found.begin :]).strip())
            return
        yield CallPart(self._next, found.call.name, found.arguments)
        self._next += 1
