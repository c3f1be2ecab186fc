"""The text of tokens that come one by one."""

from __future__ import annotations

import codecs

from lockstep.data.tokenizer import ByteTokenizer, Tokenizer

LONGEST_PIECE = 32
"""Most tokens that a stream holds back."""


class StreamDecoder:
    """Text of a growing list of tokens, piece by piece, never half a character.

    Each token costs two decodings of a few tokens, however long the text is.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._bytes = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # Decoded together: the tokens of the last finished piece, as context (some decoders treat the first token of a
        # text differently), and those since. A piece starts and ends between characters, so the context cannot spoil
        # a character that follows. `_shown` of their characters have been returned already.
        self._held: list[int] = []
        self._context = 0
        self._shown = 0

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is still open."""
        if isinstance(self._tokenizer, ByteTokenizer):
            return self._bytes.decode(bytes([token]) if token < 256 else b"")
        self._held.append(token)
        text = self._tokenizer.decode(self._held)
        whole = text.rstrip("\N{REPLACEMENT CHARACTER}")
        new = whole[self._shown :]
        self._shown = max(self._shown, len(whole))
        if new and len(whole) == len(text):
            self._drop(self._context, len(text))
        elif len(self._held) > LONGEST_PIECE:
            # Special tokens or bytes that are not UTF-8: a character is at most 4 bytes, so all but 3 are final.
            final = max(self._shown, len(text) - 3)
            new, self._shown = new + text[self._shown : final], final
            self._drop(len(self._held) - 8, len(text))
        return new

    def finish(self) -> str:
        """What is left, with replacement characters for a character that never ended."""
        if isinstance(self._tokenizer, ByteTokenizer):
            return self._bytes.decode(b"", final=True)
        return self._tokenizer.decode(self._held)[self._shown :]

    def _drop(self, count: int, length: int) -> None:
        """Forgets the first `count` of the held tokens, whose text has `length` characters."""
        pending = length - self._shown
        self._held = self._held[count:]
        self._context = len(self._held)
        self._shown = max(0, len(self._tokenizer.decode(self._held)) - pending)
