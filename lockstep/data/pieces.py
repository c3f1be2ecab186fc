"""Single tokens in readable form, as text, and as bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from lockstep.data.tokenizer import Tokenizer, byte_characters, special_ids

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""The name of a byte token, in byte fallback and in `ByteTokenizer`."""


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
