"""Replies that may begin with reasoning between `<think>` and `</think>`, and may end with calls."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from lockstep.data.replies.calls import BEGINS_CALL, WrittenCall, calls_in
from lockstep.data.replies.form import THINK, THINK_END, Marked, Piece, ReplyForm
from lockstep.data.replies.formats import LLAMA3
from lockstep.data.replies.growing import GrowingCalls

PERHAPS_CALL = re.compile(r'\{\s*("[a-z]*("\s*)?)?')
"""A beginning of JSON too short to tell whether it is a call."""


class ThinkTagReply:
    """Only the beginning of a reply can be reasoning: later tags are content. Whitespace next to tags is structure.

    If neither reply nor prompt has the `<think>` of a `</think>`, everything before it was reasoning. Pieces that were
    returned earlier are then labeled content; `reasoning` and `content` are correct.

    after: the tag that the prompt ends with, if any: `<think>`, or `</think>` if the reply has no reasoning.
    """

    def __init__(self, form: ReplyForm, after: str = ""):
        self._format = form.calls
        first = form.calls.marks[: 2 if form.calls.family == "deepseek" else 1] if form.calls else ()
        self._begin_calls = frozenset(first)
        self._state: Literal["start", "reasoning", "content", "call"]
        self._state = "reasoning" if after == THINK else "start" if form.thinks else "content"
        self._closed = after == THINK_END
        """Whether there was a `</think>`."""
        self._pending = ""
        """Text whose section is undecided: whitespace, which is shown only between other text, and JSON."""
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._parameters = form.parameters
        self._calls = self._no_calls()

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def calls(self) -> tuple[WrittenCall, ...]:
        """Once the reply is finished."""
        if self._calls is None or self._state != "call":
            return ()
        return calls_in(self._calls.whole())

    def take(self, item: Marked) -> Iterator[Piece]:
        """The pieces that this text or mark completes."""
        if item.mark == THINK_END and not self._closed:
            yield from self._close(item)
        elif item.mark == THINK and not self._closed and self._state in ("start", "reasoning") and self._is_empty():
            yield from self._structure(item.text)
            self._state = "reasoning"
        elif self._state == "call":
            yield self._called(item)
        elif item.mark in self._begin_calls and self._may_call():
            yield from self._structure()
            self._state = "call"
            yield self._called(item)
        else:
            yield from self._text(item.text)

    def finish(self) -> Iterator[Piece]:
        """The remaining pieces."""
        if self._state in ("start", "content") and self._pending and not (self._closed and self._is_empty()):
            yield self._shown("content", self._pending)
            self._pending = ""
        yield from self._structure()
        if self._calls is not None and self._state == "call":
            yield Piece("call", "", calls=tuple(self._calls.finish()))

    def _no_calls(self) -> GrowingCalls | None:
        return GrowingCalls(self._format, self._parameters) if self._format else None

    def _close(self, item: Marked) -> Iterator[Piece]:
        if self._state in ("content", "call"):
            yield Piece("content", self._pending + item.text)
            called = self._calls.whole().text if self._calls else ""
            self._reasoning, self._content = [(self.content + called).strip()], []
            self._pending, self._calls = "", self._no_calls()
        else:
            yield from self._structure(item.text)
        self._state, self._closed = "start", True

    def _text(self, text: str) -> Iterator[Piece]:
        text = self._pending + text
        self._pending = ""
        if self._state == "start":
            begins = self._begins_call(text)
            if begins:
                self._state = "call"
                yield self._called(Marked(text))
                return
            if begins is None or not text.strip():
                self._pending = text
                return
            self._state = "content"
        section: Literal["reasoning", "content"] = "reasoning" if self._state == "reasoning" else "content"
        shown = text.rstrip() if section == "reasoning" or self._format else text
        self._pending = text[len(shown) :]
        if self._is_before(section) and (section == "reasoning" or self._closed):
            begin = len(shown) - len(shown.lstrip())
            if begin:
                yield Piece("structure", shown[:begin])
            shown = shown[begin:]
        if shown:
            yield self._shown(section, shown)

    def _may_call(self) -> bool:
        return self._state == "start" or (self._state == "content" and self._format is not LLAMA3)

    def _begins_call(self, text: str) -> bool | None:
        """Whether a reply that begins with this text is a call without a mark; None if undecided."""
        text = text.lstrip()
        if self._format is not LLAMA3 or (text and not text.startswith("{")):
            return False
        return True if BEGINS_CALL.match(text) else None if not text or PERHAPS_CALL.fullmatch(text) else False

    def _is_empty(self) -> bool:
        """Whether the section has only whitespace so far."""
        return not self._pending.strip() and (self._state == "start" or self._is_before(self._state))

    def _is_before(self, section: str) -> bool:
        return not (self._reasoning if section == "reasoning" else self._content)

    def _shown(self, section: Literal["reasoning", "content"], text: str) -> Piece:
        (self._reasoning if section == "reasoning" else self._content).append(text)
        return Piece(section, text)

    def _called(self, item: Marked) -> Piece:
        assert self._calls is not None  # only a format has calls
        return Piece("call", item.text, calls=tuple(self._calls.take(item.mark or item.text, item.mark)))

    def _structure(self, text: str = "") -> Iterator[Piece]:
        """Yields the pending text and `text` as structure, which is not shown."""
        if self._pending or text:
            yield Piece("structure", self._pending + text)
        self._pending = ""
