"""Replies in gpt-oss's channels: messages with a header of role, channel, recipient and type.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>

The recipient may also precede the channel.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import Literal

from lockstep.data.replies.calls import WrittenCall, bounded, call_to
from lockstep.data.replies.form import CHANNEL, CONSTRAIN, ENDS, MESSAGE, START, Marked, Piece, Section
from lockstep.data.replies.growing import CallPart, GrowingCall

RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")


class ChannelReply:
    """Messages in the final channel, or in none, are content; messages to a tool are calls; all other messages of the
    assistant (analysis, and commentary without recipient) are reasoning. Line breaks join the messages of a section.

    A reply without any header is content, for models tuned to answer without channels.
    """

    def __init__(self) -> None:
        self._state: Literal["header", "body", "between"] = "header"
        self._header = "assistant"
        self._unmarked: str | None = ""
        """The beginning of the reply, while it may belong to the prompt's header; None once that is decided."""
        self._section: Section = "structure"
        self._parts: dict[Section, list[list[str]]] = {"reasoning": [], "content": []}
        """Per section, the texts of each message."""
        self._recipient = ""
        self._call_text: list[str] = []
        self._calls: list[WrittenCall] = []
        self._next = 0
        self._open: GrowingCall | None = None

    @property
    def reasoning(self) -> str:
        return self._joined("reasoning")

    @property
    def content(self) -> str:
        return self._joined("content")

    @property
    def calls(self) -> tuple[WrittenCall, ...]:
        """Once the reply is finished."""
        return bounded(self._calls)

    def continues(self, items: Iterator[Marked]) -> None:
        """Reads the prompt from its last `<|start|>` on, which the reply continues."""
        for item in items:
            deque(self.take(item), 0)
        self._parts = {"reasoning": [], "content": []}
        self._unmarked = "" if self._state == "header" and CHANNEL not in self._header else None

    def take(self, item: Marked) -> Iterator[Piece]:
        """The pieces that this text or mark completes."""
        if item.mark or self._unmarked is None:
            yield from self._known(item)
            return
        text = self._unmarked + item.text
        self._unmarked = text
        if not text.strip() or " to=".startswith(text) or re.match(r"\s*to=", text):
            return
        self._unmarked = None
        self._begin("content")
        yield from self._known(Marked(text))

    def finish(self) -> Iterator[Piece]:
        """Ends the reply."""
        if self._unmarked:
            yield Piece("structure", self._unmarked)
        self._unmarked = None
        yield from self._end_call(ENDS[2])

    def _known(self, item: Marked) -> Iterator[Piece]:
        if self._unmarked:
            self._header += self._unmarked
            yield Piece("structure", self._unmarked)
        self._unmarked = None
        if item.mark:
            yield from self._mark(item.mark)
        elif self._state == "header":
            self._header += item.text
        elif self._state == "body":
            yield from self._body(item.text)
            return
        if item.text:
            yield Piece("structure", item.text)

    def _mark(self, mark: str) -> Iterator[Piece]:
        if mark in ENDS:
            yield from self._end_call("")
            self._state = "between"
        elif mark == START:
            yield from self._end_call(ENDS[2])
            self._state, self._header = "header", ""
        elif mark == CHANNEL:
            # Without a preceding end, it begins another message: a channel name follows, not content.
            if self._state != "header":
                yield from self._end_call(ENDS[2])
                self._state, self._header = "header", "assistant"
            self._header += CHANNEL
        elif mark == CONSTRAIN and self._state == "header":
            self._header += f" {CONSTRAIN}"
        elif mark == MESSAGE and self._state != "body":
            self._read_header(self._header if self._state == "header" else "assistant")

    def _read_header(self, header: str) -> None:
        before, _, after = header.partition(CHANNEL)
        match = RECIPIENT.search(after) or RECIPIENT.search(before)
        role = RECIPIENT.sub("", before).strip()
        channel = re.split(r"[\s<]", after, maxsplit=1)[0]
        recipient = match[1] if match and match[1] not in ("assistant", "user", "all") else ""
        if role not in ("", "assistant"):
            self._begin("structure")
        elif recipient:
            self._begin("call", recipient)
        else:
            self._begin("content" if channel in ("", "final") else "reasoning")

    def _begin(self, section: Section, recipient: str = "") -> None:
        self._state, self._section, self._recipient, self._call_text = "body", section, recipient, []
        if section in self._parts:
            self._parts[section].append([])

    def _body(self, text: str) -> Iterator[Piece]:
        if self._section == "call":
            self._call_text.append(text)
            yield Piece("call", text, calls=tuple(self._called(text)))
            return
        elif self._section in self._parts:
            messages = self._parts[self._section]
            if not messages:
                messages.append([])  # this message began in the prompt
            if not messages[-1] and any(messages[:-1]):
                yield Piece(self._section, "\n", sampled=False)
            messages[-1].append(text)
        yield Piece(self._section, text)

    def _called(self, text: str) -> Iterator[CallPart]:
        whole = "" if self._open else "".join(self._call_text).lstrip()
        if whole.startswith("{"):
            text = whole
            self._open = GrowingCall(self._next, self._name)
            self._next += 1
        if self._open is not None:
            yield from self._open.take(text)

    @property
    def _name(self) -> str:
        return self._recipient.removeprefix("functions.")

    def _end_call(self, missing: str) -> Iterator[Piece]:
        if self._state == "body" and self._section == "call":
            call = call_to(self._name, "".join(self._call_text), missing)
            self._calls.append(call)
            if self._open is None and call.text:
                yield Piece("call", "", calls=(CallPart(-1, unread=call.text),))
        self._section, self._open = "structure", None

    def _joined(self, section: Section) -> str:
        return "\n".join("".join(texts) for texts in self._parts[section] if texts)
