"""The format of a model's replies, from its chat template and vocabulary; text and marks of it; sections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple

from lockstep.data.replies.calls import GPT_OSS, ToolFormat, tool_format
from lockstep.data.tokenizer import Tokenizer

THINK, THINK_END = "<think>", "</think>"
START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
"""The tokens that end a message in a channel."""
CHANNELS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)


@dataclass(frozen=True)
class ReplyForm:
    """The structure of a family's replies; by default a reply is only content."""

    channels: bool = False
    """Messages in channels, as in gpt-oss."""
    thinks: bool = False
    """Reasoning between `<think>` and `</think>` at the beginning; it may begin in the prompt."""
    calls: ToolFormat | None = None
    """The format in which calls are parsed; None: text that looks like calls is content, except in channels."""
    ids: Mapping[int, str] = field(default_factory=dict, hash=False)
    """Structural tokens by id; their text, if not from the token, is ordinary text."""
    texts: tuple[str, ...] = ()
    """Structural marks without a token in the vocabulary, which are recognized by their text."""


PLAIN = ReplyForm()


@lru_cache(maxsize=16)
def reply_form(tokenizer: Tokenizer, template: str | None = None, tools: bool = False) -> ReplyForm:
    """The form of replies to prompts rendered by a chat template (its source; None: decided by the vocabulary alone).
    tools: whether the prompt has tools, so that calls are parsed."""
    vocabulary = tokenizer.vocabulary()
    channels = {START, CHANNEL, MESSAGE, ENDS[0]} <= vocabulary.keys()
    if channels and (template is None or CHANNEL in template):
        ids = {vocabulary[name]: name for name in CHANNELS if name in vocabulary}
        return ReplyForm(channels=True, calls=GPT_OSS, ids=ids)
    format = tool_format(template) if tools and template is not None else None
    if format is GPT_OSS:  # but the vocabulary lacks the tokens of channels
        format = None
    # Calls within reasoning are not parsed, even if neither template nor vocabulary has think tags.
    thinks = format is not None or {THINK, THINK_END} <= vocabulary.keys() or THINK_END in (template or "")
    marks = [*((THINK, THINK_END) if thinks else ()), *(format.marks if format else ())]
    ids = {vocabulary[name]: name for name in marks if name in vocabulary}
    return ReplyForm(False, thinks, format, ids, tuple(name for name in marks if name not in vocabulary))


Section = Literal["reasoning", "content", "call", "structure"]


class Piece(NamedTuple):
    """Text of a section."""

    section: Section
    text: str
    sampled: bool = True
    """False for a line break between two messages, which is not from a token."""
