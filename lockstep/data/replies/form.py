"""Which form a model's replies have, by its chat template and its vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from lockstep.data.replies.calls import GPT_OSS, ToolFormat, tool_format
from lockstep.data.tokenizer import Tokenizer

THINK, THOUGHT = "<think>", "</think>"
START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
"""The tokens that end a message in a channel."""
CHANNELS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)


@dataclass(frozen=True)
class ReplyForm:
    """What is structure in a family's replies; without anything, a reply is content from its first token on."""

    channels: bool = False
    """Messages in channels, as gpt-oss writes them."""
    thinks: bool = False
    """Reasoning between `<think>` and `</think>` at the beginning, or in part in the prompt."""
    calls: ToolFormat | None = None
    """The format in which calls are read; None: what looks like calls is content, except in channels."""
    ids: Mapping[int, str] = field(default_factory=dict, hash=False)
    """The tokens that are structure, whose text alone is not."""
    texts: tuple[str, ...] = ()
    """Structure that the vocabulary has no token for, so that its text counts."""


PLAIN = ReplyForm()


@lru_cache(maxsize=16)
def reply_form(tokenizer: Tokenizer, template: str | None = None, tools: bool = False) -> ReplyForm:
    """The form of replies to prompts that are rendered by a chat template, given as its source; None: by the vocabulary
    alone. tools: whether the model is shown any, so that its calls are read."""
    vocabulary = tokenizer.vocabulary()
    channels = {START, CHANNEL, MESSAGE, ENDS[0]} <= vocabulary.keys()
    if channels and (template is None or CHANNEL in template):
        ids = {vocabulary[name]: name for name in CHANNELS if name in vocabulary}
        return ReplyForm(channels=True, calls=GPT_OSS, ids=ids)
    format = tool_format(template) if tools and template is not None else None
    if format is GPT_OSS:  # without the tokens of channels
        format = None
    # Calls are not read in reasoning, even if neither template nor vocabulary knows any.
    thinks = format is not None or {THINK, THOUGHT} <= vocabulary.keys() or THOUGHT in (template or "")
    marks = [*((THINK, THOUGHT) if thinks else ()), *(format.marks if format else ())]
    ids = {vocabulary[name]: name for name in marks if name in vocabulary}
    return ReplyForm(False, thinks, format, ids, tuple(name for name in marks if name not in vocabulary))
