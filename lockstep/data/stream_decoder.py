"""The text of tokens that continue another text: all at once, or as they come one by one."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import islice

from lockstep.data.tokenizer import ByteTokenizer, Tokenizer, special_ids

LONGEST_PIECE = 32
"""Most tokens that a stream holds back."""
LONGEST_CONTEXT = 8
"""In tokens: more than a character has bytes."""


def decoding_context(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[int]:
    """The last of a text's `tokens`, with which those that follow are decoded: some decoders treat the first token of a
    text differently. Special tokens are not among them. Empty if the text ends within a character, or with U+FFFD,
    which cannot be told from one."""
    if isinstance(tokenizer, ByteTokenizer):
        return []
    context: list[int] = []
    special, text = special_ids(tokenizer), ""
    for token in islice((t for t in reversed(tokens) if t not in special), LONGEST_CONTEXT):
        context.insert(0, token)
        text = tokenizer.decode(context)
        if text and "\N{REPLACEMENT CHARACTER}" not in text:
            return context
    return [] if text else context


def continuation(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """The text that `tokens` add to that of `prompt`."""
    context = decoding_context(tokenizer, prompt)
    return tokenizer.decode([*context, *tokens])[len(tokenizer.decode(context)) :]


class StreamDecoder:
    """Text of a growing list of tokens, piece by piece, never half a character.

    `context`: what `decoding_context` returns for the text that they continue. Each token costs two decodings of a few
    tokens, however long the text is.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()):
        self.tokenizer, self.special = tokenizer, special_ids(tokenizer)
        self._bytes = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # Decoded together: the context, later the tokens of the last finished piece, and those since. A piece starts
        # and ends between characters, so the context cannot spoil a character that follows. `_shown` of their
        # characters have been returned already.
        self._held = list(context)
        self._context = len(self._held)
        self._shown = len(tokenizer.decode(self._held)) if context else 0

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is still open."""
        if isinstance(self.tokenizer, ByteTokenizer):
            return self._bytes.decode(bytes([token]) if token < 256 else b"")
        if token in self.special:
            return ""
        self._held.append(token)
        text = self.tokenizer.decode(self._held)
        whole = text.rstrip("\N{REPLACEMENT CHARACTER}")
        new = whole[self._shown :]
        self._shown = max(self._shown, len(whole))
        if new and len(whole) == len(text):
            self._drop(self._context, len(text))
        elif len(self._held) > LONGEST_PIECE:
            # Bytes that are not UTF-8: a character is at most 4 bytes, so all but 3 are final.
            final = max(self._shown, len(text) - 3)
            new, self._shown = new + text[self._shown : final], final
            self._drop(len(self._held) - 8, len(text))
        return new

    def finish(self) -> str:
        """What is left, with replacement characters for a character that never ended."""
        if isinstance(self.tokenizer, ByteTokenizer):
            return self._bytes.decode(b"", final=True)
        return self.tokenizer.decode(self._held)[self._shown :]

    def flush(self) -> str:
        """As `finish`, but other text follows, which does not continue a character that is still open."""
        left = self.finish()
        if left and not isinstance(self.tokenizer, ByteTokenizer):
            self._held, self._context, self._shown = [], 0, 0
        return left

    def _drop(self, count: int, length: int) -> None:
        """Forgets the first `count` of the held tokens, whose text has `length` characters."""
        pending = length - self._shown
        self._held = self._held[count:]
        self._context = len(self._held)
        self._shown = max(0, len(self.tokenizer.decode(self._held)) - pending)
