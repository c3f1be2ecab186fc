"""A reply's tokens taken apart: as they come, or all at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lockstep.data.replies.calls import ToolCall
from lockstep.data.replies.channels import ChannelReply
from lockstep.data.replies.form import START, ReplyForm
from lockstep.data.replies.marked_text import MarkedText, marked
from lockstep.data.replies.sections import Piece
from lockstep.data.replies.thoughts import ThoughtReply
from lockstep.data.stream_decoder import StreamDecoder
from lockstep.data.tokenizer import Tokenizer

TAIL = 16
"""Tokens at the end of a prompt among which `<think>` or `</think>` would be."""


@dataclass(frozen=True)
class ReplyParts:
    """What a reply says."""

    reasoning: str
    content: str
    """Apart from reasoning and calls."""
    calls: tuple[ToolCall, ...] = ()
    """Also those that cannot be parsed, each with its problem."""


class ReplyReader:
    """Takes a reply apart while it is sampled, with a decoder that has the context of its prompt.

    The pieces, apart from those not sampled, joined are the text that the decoder gives. prompt: the tokens that the
    reply continues, which may end within its reasoning, or within a channel's header.
    """

    def __init__(self, form: ReplyForm, decoder: StreamDecoder, prompt: Sequence[int] = ()):
        self.form = form
        self._text = MarkedText(form, decoder)
        self._reply = _begin(form, decoder.tokenizer, prompt)

    def push(self, token: int) -> list[Piece]:
        """What this token completes."""
        return [piece for item in self._text.push(token) for piece in self._reply.take(item)]

    def finish(self) -> list[Piece]:
        """What is left after the last token."""
        return [*(piece for item in self._text.finish() for piece in self._reply.take(item)), *self._reply.finish()]

    def parts(self) -> ReplyParts:
        """All of the reply, once it is finished."""
        return _parts(self._reply)


def read_reply(
    form: ReplyForm,
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    prompt: Sequence[int] = (),
    end_ids: Collection[int] = (),
) -> ReplyParts:
    """Takes a whole reply apart. end_ids: tokens that end a reply, and have no text as its last one."""
    reply = _begin(form, tokenizer, prompt)
    ends = bool(tokens) and tokens[-1] in end_ids and tokens[-1] not in form.ids
    for item in marked(form, tokenizer, tokens[:-1] if ends else tokens, prompt):
        deque(reply.take(item), 0)
    deque(reply.finish(), 0)
    return _parts(reply)


def _begin(form: ReplyForm, tokenizer: Tokenizer, prompt: Sequence[int]) -> ChannelReply | ThoughtReply:
    if not form.channels:
        return ThoughtReply(form, _last_mark(form, tokenizer, prompt[-TAIL:]) if form.thinks else "")
    reply = ChannelReply()
    if begin := _last_start(form, prompt):
        reply.continues(marked(form, tokenizer, prompt[begin - 1 :]))
    return reply


def _parts(reply: ChannelReply | ThoughtReply) -> ReplyParts:
    return ReplyParts(reply.reasoning, reply.content, reply.calls)


def _last_start(form: ReplyForm, prompt: Sequence[int]) -> int:
    """Where the prompt's last message begins, counted from 1; 0 if there is none."""
    return next((n for n in range(len(prompt), 0, -1) if form.ids.get(prompt[n - 1]) == START), 0)


def _last_mark(form: ReplyForm, tokenizer: Tokenizer, tail: Sequence[int]) -> str:
    """The mark that a prompt with this end ends with, apart from whitespace; empty if it ends with text."""
    items = [item for item in marked(form, tokenizer, tail) if item.mark or item.text.strip()]
    return items[-1].mark if items else ""
