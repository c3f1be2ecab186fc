"""The format of a model's replies, from its chat template and vocabulary; their text, split at structural marks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from lockstep.data.decoding import StreamDecoder, continuation
from lockstep.data.replies.formats import GPT_OSS, ToolFormat, tool_format
from lockstep.data.replies.growing import CallPart
from lockstep.data.replies.tagged_calls import Parameters
from lockstep.data.tokenizer import Tokenizer, special_ids

THINK, THINK_END = "<think>", "</think>"
BRACKETS = {"[THINK]": THINK, "[/THINK]": THINK_END}
"""Mistral's special tokens for the same: Magistral, Ministral 3 and later. As text they are content."""
START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
"""The tokens that end a message in a channel."""
CHANNELS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
Section = Literal["reasoning", "content", "call", "structure"]
CONTEXT = 32
"""Number of preceding tokens, including special ones, used as decoding context."""


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
    parameters: Parameters = field(default_factory=dict, hash=False)
    """The JSON schemas of the tools' arguments, if known: some formats do not tell strings from other values."""

    def with_tools(self, tools: Iterable[Mapping[str, Any]]) -> ReplyForm:
        """The form with the schemas of tools in OpenAI's format."""
        functions = [tool.get("function", tool) for tool in tools]
        return replace(self, parameters={f["name"]: f.get("parameters") or {} for f in functions if "name" in f})


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
    special = special_ids(tokenizer)
    brackets = {vocabulary[name]: tag for name, tag in BRACKETS.items() if vocabulary.get(name) in special}
    # Calls within reasoning are not parsed, even if neither template nor vocabulary has think tags.
    tags = {THINK, THINK_END} <= vocabulary.keys() or THINK_END in (template or "")
    thinks = format is not None or tags or len(brackets) == len(BRACKETS)
    names = (THINK, THINK_END) if tags or not brackets else ()
    marks = [*(names if thinks else ()), *(format.marks if format else ())]
    ids = {vocabulary[name]: name for name in marks if name in vocabulary} | (brackets if thinks else {})
    return ReplyForm(False, thinks, format, ids, tuple(name for name in marks if name not in vocabulary))


class Piece(NamedTuple):
    """Text of a section."""

    section: Section
    text: str
    sampled: bool = True
    """False for a line break between two messages, which is not from a token."""
    calls: tuple[CallPart, ...] = ()
    """The parts of calls that are known with this text."""


class Marked(NamedTuple):
    """Text, or a mark."""

    text: str
    """For a mark: the text of its token, empty for a special token."""
    mark: str = ""
    """The mark's name; empty for text."""


class MarkedText:
    """Yields text and marks in order. All texts joined equal the decoder's text of the tokens."""

    def __init__(self, form: ReplyForm, decoder: StreamDecoder):
        self._form, self._decoder = form, decoder
        self._pending = ""
        """Text that may be the beginning of a mark that has no token."""

    def push(self, token: int) -> Iterator[Marked]:
        """What this token completes."""
        name = self._form.ids.get(token)
        if name is None:
            yield from self._texts(self._decoder.push(token))
            return
        # A character that is still open will never be completed.
        before, text = self._decoder.flush() if token in self._decoder.special else "", self._decoder.push(token)
        if text.endswith(name):
            before, text = before + text.removesuffix(name), name
        yield from self._texts(before, last=True)
        yield Marked(text, name)

    def finish(self) -> Iterator[Marked]:
        """The remaining text."""
        yield from self._texts(self._decoder.finish(), last=True)

    def _texts(self, new: str, last: bool = False) -> Iterator[Marked]:
        items = list(marked_names(self._pending + new, self._form.texts))
        self._pending = ""
        if items and not items[-1].mark and not last:
            text = items.pop().text
            end = len(text) - _partial_name(text, self._form.texts)
            self._pending = text[end:]
            items += [Marked(text[:end])] if end else []
        yield from items


def _partial_name(text: str, names: tuple[str, ...]) -> int:
    """Length of the longest suffix of the text that is a proper prefix of a name."""
    return max((n for name in names for n in range(1, len(name)) if text.endswith(name[:n])), default=0)


def marked(
    form: ReplyForm, tokenizer: Tokenizer, tokens: Sequence[int], before: Sequence[int] = ()
) -> Iterator[Marked]:
    """As `MarkedText` for complete `tokens`, which continue those `before`: decoded in long pieces."""
    special, begin = special_ids(tokenizer), 0
    for place, token in enumerate(tokens):
        if name := form.ids.get(token):
            yield from marked_names(_continuing(tokenizer, before, tokens, begin, place), form.texts)
            yield Marked("" if token in special else name, name)
            begin = place + 1
    yield from marked_names(_continuing(tokenizer, before, tokens, begin, len(tokens)), form.texts)


def _continuing(tokenizer: Tokenizer, before: Sequence[int], tokens: Sequence[int], begin: int, end: int) -> str:
    if begin == end:
        return ""
    context = tokens[max(0, begin - CONTEXT) : begin] if begin else before[-CONTEXT:]
    return continuation(tokenizer, context, tokens[begin:end])


def marked_names(text: str, names: tuple[str, ...]) -> Iterator[Marked]:
    """Splits a whole text; every name in it is a mark."""
    for part in re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]:
        if part:
            yield Marked(part, part if part in names else "")
