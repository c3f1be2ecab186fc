"""Parses replies given as text, with special tokens spelled out."""

from __future__ import annotations

from collections import deque

from lockstep.data.replies.calls import GPT_OSS, ToolCall, ToolFormat
from lockstep.data.replies.channels import ChannelReply
from lockstep.data.replies.form import CHANNELS, THINK, THINK_END, ReplyForm
from lockstep.data.replies.marked_text import marked_names
from lockstep.data.replies.think_tags import ThinkTagReply

ENDS = ("<|eom_id|>", "<|eot_id|>", "<|im_end|>", "<｜end▁of▁sentence｜>")


def parse_calls(text: str, format: ToolFormat) -> tuple[ToolCall, ...]:
    """The calls in a reply, in order. One that cannot be parsed has a `problem`; nothing is raised.

    Everything before the first `</think>` is reasoning, in which calls are ignored.
    """
    reply: ChannelReply | ThinkTagReply
    names: tuple[str, ...]
    if format is GPT_OSS:
        reply, names = ChannelReply(), CHANNELS
    else:
        reply, names = ThinkTagReply(ReplyForm(thinks=True, calls=format)), (THINK, THINK_END, *format.marks)
        text = text.rstrip()
        for end in ENDS:
            text = text.removesuffix(end)
    for item in marked_names(text, names):
        deque(reply.take(item), 0)
    deque(reply.finish(), 0)
    return reply.calls
