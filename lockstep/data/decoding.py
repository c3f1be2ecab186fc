"""Tokens as text: all at once, one by one as they arrive, and each alone in readable form."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice

from lockstep.data.tokenizer import ByteTokenizer, Tokenizer, byte_characters, special_ids

LONGEST_PIECE = 32
"""Maximum number of tokens whose text is held back."""
LONGEST_CONTEXT = 8
"""In tokens; more than the bytes of a character."""
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""The name of a byte token, in byte fallback and in `ByteTokenizer`."""


def decoding_context(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[int]:
    """The last few of a text's `tokens`, as context for decoding those that follow: some decoders treat the first token
    of a text differently. Without special tokens. Empty if the text ends within a character, or with U+FFFD, which
    looks the same."""
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
    """The text that `tokens` add after `prompt`."""
    context = decoding_context(tokenizer, prompt)
    return tokenizer.decode([*context, *tokens])[len(tokenizer.decode(context)) :]


class StreamDecoder:
    """Incrementally decodes tokens to text, never returning half a character.

    `context`: the `decoding_context` of the text that the tokens continue. Each token costs two decodings of a few
    tokens, however long the text is.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()):
        self.tokenizer, self.special = tokenizer, special_ids(tokenizer)
        self._bytes = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # Decoded together: the context (later the tokens of the last finished piece), and the tokens since. A piece
        # starts and ends between characters, so the context cannot corrupt a following character. `_shown` of their
        # characters have been returned.
        self._tokens = list(context)
        self._context = len(self._tokens)
        self._shown = len(tokenizer.decode(self._tokens)) if context else 0

    def push(self, token: int) -> str:
        """The text that this token completes; empty within a character."""
        if isinstance(self.tokenizer, ByteTokenizer):
            return self._bytes.decode(bytes([token]) if token < 256 else b"")
        if token in self.special:
            return ""
        self._tokens.append(token)
        text = self.tokenizer.decode(self._tokens)
        whole = text.rstrip("\N{REPLACEMENT CHARACTER}")
        new = whole[self._shown :]
        self._shown = max(self._shown, len(whole))
        if new and len(whole) == len(text):
            self._drop(self._context, len(text))
        elif len(self._tokens) > LONGEST_PIECE:
            # Invalid UTF-8: a character is at most 4 bytes, so all but the last 3 are final.
            final = max(self._shown, len(text) - 3)
            new, self._shown = new + text[self._shown : final], final
            self._drop(len(self._tokens) - 8, len(text))
        return new

    def finish(self) -> str:
        """The remaining text, with replacement characters for an incomplete character."""
        if isinstance(self.tokenizer, ByteTokenizer):
            return self._bytes.decode(b"", final=True)
        return self.tokenizer.decode(self._tokens)[self._shown :]

    def flush(self) -> str:
        """As `finish`, for when unrelated text follows, which does not complete an open character."""
        left = self.finish()
        if left and not isinstance(self.tokenizer, ByteTokenizer):
            self._tokens, self._context, self._shown = [], 0, 0
        return left

    def _drop(self, count: int, length: int) -> None:
        """Drops the first `count` tokens; `length`: characters of the text of all tokens."""
        pending = length - self._shown
        self._tokens = self._tokens[count:]
        self._context = len(self._tokens)
        self._shown = max(0, len(self.tokenizer.decode(self._tokens)) - pending)


def token_pieces(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Each token in readable form: its text, a special token's name, or `\\xNN` for bytes that are not UTF-8 alone."""
    names = _names(tokenizer)
    return [_piece(tokenizer, token, names.get(token)) for token in tokens]


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """The text that a token adds; empty for a special token and for bytes that are not UTF-8 alone."""
    return _alone(tokenizer, token) or ""


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes | None:
    """The UTF-8 bytes that a token adds to a text; None for a special token."""
    name = _names(tokenizer).get(token)
    if name is None or token in special_ids(tokenizer):
        return None
    text = _alone(tokenizer, token)
    return _bytes(name) if text is None else text.encode()


def _piece(tokenizer: Tokenizer, token: int, name: str | None) -> str:
    if name is None:
        return f"[{token}]"
    added = token_bytes(tokenizer, token)
    return name if added is None else added.decode(errors="backslashreplace")


@lru_cache(maxsize=2**18)
def _alone(tokenizer: Tokenizer, token: int) -> str | None:
    """The text that a token adds; None for bytes that are not UTF-8 alone."""
    context, length = _before(tokenizer)
    text = tokenizer.decode([*context, token])[length:]
    # A vocabulary can contain U+FFFD itself.
    return None if "\N{REPLACEMENT CHARACTER}" in text and text != _names(tokenizer).get(token) else text


def _bytes(name: str) -> bytes | None:
    """The bytes that a token's name spells."""
    if byte := BYTE.fullmatch(name):
        return bytes([int(byte[1], 16)])
    bytes_of = _bytes_of_characters()
    return bytes(bytes_of[character] for character in name) if all(c in bytes_of for c in name) else None


@lru_cache(maxsize=1)
def _bytes_of_characters() -> dict[str, int]:
    return {character: byte for byte, character in byte_characters().items()}


@lru_cache(maxsize=4)
def _names(tokenizer: Tokenizer) -> dict[int, str]:
    return {number: name for name, number in tokenizer.vocabulary().items()}


@lru_cache(maxsize=4)
def _before(tokenizer: Tokenizer) -> tuple[list[int], int]:
    """A token with text, as decoding context for others, and the length of its text."""
    for token in range(tokenizer.vocab_size):
        text = tokenizer.decode([token])
        if text.strip() and "\N{REPLACEMENT CHARACTER}" not in text:
            return [token], len(text)
    return [], 0
