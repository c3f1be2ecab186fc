"""Parses a reply's tokens, as they arrive or all at once, and replies given as text."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from lockstep.data.decoding import StreamDecoder
from lockstep.data.replies.calls import ToolCall, WrittenCall
from lockstep.data.replies.channels import ChannelReply
from lockstep.data.replies.form import (
    CHANNELS,
    START,
    THINK,
    THINK_END,
    MarkedText,
    Piece,
    ReplyForm,
    marked,
    marked_names,
)
from lockstep.data.replies.formats import GPT_OSS, ToolFormat
from lockstep.data.replies.tagged_calls import Parameters
from lockstep.data.replies.think_tags import ThinkTagReply
from lockstep.data.tokenizer import Tokenizer

TAIL = 16
"""Tokens at the end of a prompt in which `<think>` or `</think>` is searched for."""


@dataclass(frozen=True)
class ReplyParts:
    """A parsed reply."""

    reasoning: str
    content: str
    """Without reasoning and calls."""
    calls: tuple[ToolCall, ...] = ()
    """Including those that cannot be parsed, each with its problem."""
    written: tuple[WrittenCall, ...] = field(default=(), compare=False, repr=False)
    """The same, with the JSON of their arguments as it is written."""


class ReplyReader:
    """Parses a reply while it is sampled, with a decoder that has the context of its prompt.

    The sampled pieces joined equal the decoder's text. prompt: the tokens that the reply continues, which may end
    within its reasoning, or within a channel's header.
    """

    def __init__(self, form: ReplyForm, decoder: StreamDecoder, prompt: Sequence[int] = ()):
        self.form = form
        self._text = MarkedText(form, decoder)
        self._reply = _begin(form, decoder.tokenizer, prompt)

    def push(self, token: int) -> list[Piece]:
        """The pieces that this token completes."""
        return [piece for item in self._text.push(token) for piece in self._reply.take(item)]

    def finish(self) -> list[Piece]:
        """The remaining pieces after the last token."""
        return [*(piece for item in self._text.finish() for piece in self._reply.take(item)), *self._reply.finish()]

    def parts(self) -> ReplyParts:
        """The whole reply, once it is finished."""
        return _parts(self._reply)


def read_reply(
    form: ReplyForm,
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    prompt: Sequence[int] = (),
    end_ids: Collection[int] = (),
) -> ReplyParts:
    """Parses a whole reply. end_ids: tokens that end a reply; as the last token they have no text."""
    reply = _begin(form, tokenizer, prompt)
    ends = bool(tokens) and tokens[-1] in end_ids and tokens[-1] not in form.ids
    for item in marked(form, tokenizer, tokens[:-1] if ends else tokens, prompt):
        deque(reply.take(item), 0)
    deque(reply.finish(), 0)
    return _parts(reply)


def _begin(form: ReplyForm, tokenizer: Tokenizer, prompt: Sequence[int]) -> ChannelReply | ThinkTagReply:
    if not form.channels:
        return ThinkTagReply(form, last_mark(form, tokenizer, prompt) if form.thinks else "")
    reply = ChannelReply()
    if begin := _last_start(form, prompt):
        reply.continues(marked(form, tokenizer, prompt[begin - 1 :]))
    return reply


def _parts(reply: ChannelReply | ThinkTagReply) -> ReplyParts:
    written = reply.calls
    return ReplyParts(reply.reasoning, reply.content, tuple(each.call for each in written), written)


def _last_start(form: ReplyForm, prompt: Sequence[int]) -> int:
    """Where the prompt's last message begins, counted from 1; 0 if there is none."""
    return next((n for n in range(len(prompt), 0, -1) if form.ids.get(prompt[n - 1]) == START), 0)


def last_mark(form: ReplyForm, tokenizer: Tokenizer, prompt: Sequence[int]) -> str:
    """The mark at the end of a prompt, before optional whitespace; empty if it ends with text."""
    items = [item for item in marked(form, tokenizer, prompt[-TAIL:]) if item.mark or item.text.strip()]
    return items[-1].mark if items else ""


ENDS = ("</s>", "<|eom_id|>", "<|eot_id|>", "<|im_end|>", "<｜end▁of▁sentence｜>")


def parse_calls(text: str, format: ToolFormat, parameters: Parameters | None = None) -> tuple[ToolCall, ...]:
    """The calls in a reply, in order. One that cannot be parsed has a `problem`; nothing is raised.

    parameters: the JSON schemas of the tools' arguments, for formats that do not tell strings from other values.

    Everything before the first `</think>` is reasoning, in which calls are ignored.
    """
    reply: ChannelReply | ThinkTagReply
    names: tuple[str, ...]
    if format is GPT_OSS:
        reply, names = ChannelReply(), CHANNELS
    else:
        form = ReplyForm(thinks=True, calls=format, parameters=parameters or {})
        reply, names = ThinkTagReply(form), (THINK, THINK_END, *format.marks)
        text = text.rstrip()
        for end in ENDS:
            text = text.removesuffix(end)
    for item in marked_names(text, names):
        deque(reply.take(item), 0)
    deque(reply.finish(), 0)
    return tuple(each.call for each in reply.calls)
