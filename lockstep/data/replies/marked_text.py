"""The text of a growing list of tokens, in which the marks of a form stand apart from text that looks like them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lockstep.data.replies.form import ReplyForm
from lockstep.data.stream_decoder import StreamDecoder, continuation
from lockstep.data.tokenizer import Tokenizer, special_ids

CONTEXT = 32
"""Tokens before others with which they are decoded, the special ones among them."""


class Marked(NamedTuple):
    """Text, or a mark."""

    text: str
    """Of a mark: what its token has as text, which is nothing if it is a special token."""
    mark: str = ""
    """Its name; empty: this is text."""


class MarkedText:
    """Text and marks in their order. All texts joined are what the decoder gives for the tokens."""

    def __init__(self, form: ReplyForm, decoder: StreamDecoder):
        self._form, self._decoder = form, decoder
        self._names = re.compile("|".join(map(re.escape, form.texts))) if form.texts else None
        self._held = ""
        """Text that may be the beginning of a mark without a token of its own."""

    def push(self, token: int) -> Iterator[Marked]:
        """What this token completes."""
        name = self._form.ids.get(token)
        if name is None:
            yield from self._texts(self._decoder.push(token))
            return
        # A character that has not ended yet never will.
        before, own = self._decoder.flush() if token in self._decoder.special else "", self._decoder.push(token)
        if own.endswith(name):
            before, own = before + own.removesuffix(name), name
        yield from self._texts(before, last=True)
        yield Marked(own, name)

    def finish(self) -> Iterator[Marked]:
        """What is left."""
        yield from self._texts(self._decoder.finish(), last=True)

    def _texts(self, new: str, last: bool = False) -> Iterator[Marked]:
        if self._names is None:
            if new:
                yield Marked(new)
            return
        text, place = self._held + new, 0
        for found in self._names.finditer(text):
            if found.start() > place:
                yield Marked(text[place : found.start()])
            yield Marked(found[0], found[0])
            place = found.end()
        end = len(text) if last else max(place, len(text) - _begun(text, self._form.texts))
        if end > place:
            yield Marked(text[place:end])
        self._held = text[end:]


def _begun(text: str, names: tuple[str, ...]) -> int:
    """How many of the text's last characters are the beginning of a name."""
    return max((n for name in names for n in range(1, len(name)) if text.endswith(name[:n])), default=0)


def marked(
    form: ReplyForm, tokenizer: Tokenizer, tokens: Sequence[int], before: Sequence[int] = ()
) -> Iterator[Marked]:
    """All of some tokens, which continue those `before`: as `MarkedText` gives them, decoded in long pieces."""
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
    """A whole text, in which every name is a mark."""
    for part in re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]:
        if part:
            yield Marked(part, part if part in names else "")
