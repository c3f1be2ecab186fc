"""Replies given as text, in which the special tokens are written out."""

from __future__ import annotations

from collections import deque

from lockstep.data.replies.calls import GPT_OSS, ToolCall, ToolFormat
from lockstep.data.replies.channels import ChannelReply
from lockstep.data.replies.form import CHANNELS, THINK, THOUGHT, ReplyForm
from lockstep.data.replies.marked_text import marked_names
from lockstep.data.replies.thoughts import ThoughtReply

ENDS = ("<|eom_id|>", "<|eot_id|>", "<|im_end|>", "<｜end▁of▁sentence｜>")


def parse_calls(text: str, format: ToolFormat) -> tuple[ToolCall, ...]:
    """The calls in a reply, in order. What cannot be parsed is a call with a `problem`; nothing is raised.

    Everything before the first `</think>` is reasoning, in which no calls are read.
    """
    reply: ChannelReply | ThoughtReply
    names: tuple[str, ...]
    if format is GPT_OSS:
        reply, names = ChannelReply(), CHANNELS
    else:
        reply, names = ThoughtReply(ReplyForm(thinks=True, calls=format)), (THINK, THOUGHT, *format.marks)
        text = text.rstrip()
        for end in ENDS:
            text = text.removesuffix(end)
    for item in marked_names(text, names):
        deque(reply.take(item), 0)
    deque(reply.finish(), 0)
    return reply.calls
