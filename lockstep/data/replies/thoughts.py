"""Replies that may begin with reasoning between `<think>` and `</think>`, and may end with calls."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from lockstep.data.replies.calls import BEGINS_CALL, DEEPSEEK, LLAMA3, ToolCall, calls_in
from lockstep.data.replies.form import THINK, THOUGHT, ReplyForm
from lockstep.data.replies.marked_text import Marked
from lockstep.data.replies.sections import Piece

PERHAPS_CALL = re.compile(r'\{\s*("[a-z]*("\s*)?)?')
"""JSON of which too little is there to tell whether it is a call."""


class ThoughtReply:
    """Only what a reply begins with is reasoning: later tags are content. Whitespace next to the tags is theirs.

    A reply whose `</think>` has no beginning, nor has the prompt, was all reasoning up to there. The pieces before do
    not say so, as it was not known; `reasoning` and `content` do.

    after: the tag that the prompt ends with, if it does: `<think>`, or `</think>` of a reply without reasoning.
    """

    def __init__(self, form: ReplyForm, after: str = ""):
        self._format = form.calls
        first = form.calls.marks[: 2 if form.calls is DEEPSEEK else 1] if form.calls else ()
        self._begin_calls = frozenset(first)
        self._state: Literal["start", "reasoning", "content", "call"]
        self._state = "reasoning" if after == THINK else "start" if form.thinks else "content"
        self._closed = after == THOUGHT
        """There was a `</think>`."""
        self._held = ""
        """Text whose section is not known: whitespace, which is shown only between other text, and JSON."""
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._call_text: list[str] = []
        self._call_length = 0
        self._call_marks: list[tuple[int, str]] = []

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """Once the reply is finished."""
        if self._format is None or self._state != "call":
            return ()
        return calls_in("".join(self._call_text), self._call_marks, self._format)

    def take(self, item: Marked) -> Iterator[Piece]:
        """The pieces that this text or mark completes."""
        if item.mark == THOUGHT and not self._closed:
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
        """What is left."""
        if self._state in ("start", "content") and self._held and not (self._closed and self._is_empty()):
            yield self._shown("content", self._held)
            self._held = ""
        yield from self._structure()

    def _close(self, item: Marked) -> Iterator[Piece]:
        if self._state in ("content", "call"):
            yield Piece("content", self._held + item.text)
            self._reasoning, self._content = [(self.content + "".join(self._call_text)).strip()], []
            self._held, self._call_text, self._call_length, self._call_marks = "", [], 0, []
        else:
            yield from self._structure(item.text)
        self._state, self._closed = "start", True

    def _text(self, text: str) -> Iterator[Piece]:
        text = self._held + text
        self._held = ""
        if self._state == "start":
            begins = self._begins_call(text)
            if begins:
                self._state = "call"
                yield self._called(Marked(text))
                return
            if begins is None or not text.strip():
                self._held = text
                return
            self._state = "content"
        section: Literal["reasoning", "content"] = "reasoning" if self._state == "reasoning" else "content"
        shown = text.rstrip() if section == "reasoning" or self._format else text
        self._held = text[len(shown) :]
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
        """Whether a reply that begins with this text is a call without a mark; None: not known yet."""
        text = text.lstrip()
        if self._format is not LLAMA3 or (text and not text.startswith("{")):
            return False
        return True if BEGINS_CALL.match(text) else None if not text or PERHAPS_CALL.fullmatch(text) else False

    def _is_empty(self) -> bool:
        """Whether the section has nothing but whitespace so far."""
        return not self._held.strip() and (self._state == "start" or self._is_before(self._state))

    def _is_before(self, section: str) -> bool:
        return not (self._reasoning if section == "reasoning" else self._content)

    def _shown(self, section: Literal["reasoning", "content"], text: str) -> Piece:
        (self._reasoning if section == "reasoning" else self._content).append(text)
        return Piece(section, text)

    def _called(self, item: Marked) -> Piece:
        if item.mark:
            self._call_marks.append((self._call_length, item.mark))
        self._call_text.append(item.mark or item.text)
        self._call_length += len(self._call_text[-1])
        return Piece("call", item.text)

    def _structure(self, text: str = "") -> Iterator[Piece]:
        """What is held, and this text, is not shown."""
        if self._held or text:
            yield Piece("structure", self._held + text)
        self._held = ""
