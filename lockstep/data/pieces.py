"""What each token of a text stands for, one by one, in readable form."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lockstep.data.tokenizer import Tokenizer, byte_characters

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""The name of a token that is a byte, as byte fallback and `ByteTokenizer` write it."""


def token_pieces(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """The text of each token by itself; for a special token its name; bytes that are not UTF-8 alone as `\\xNN`."""
    names = {number: name for name, number in tokenizer.vocabulary().items()}
    bytes_of = {character: byte for byte, character in byte_characters().items()}
    known = {token: _piece(tokenizer, token, names.get(token), bytes_of) for token in set(tokens)}
    return [known[token] for token in tokens]


def _piece(tokenizer: Tokenizer, token: int, name: str | None, bytes_of: dict[str, int]) -> str:
    if name is None:
        return f"[{token}]"
    if byte := BYTE.fullmatch(name):
        return bytes([int(byte[1], 16)]).decode(errors="backslashreplace")
    text = tokenizer.decode([token])
    if "\N{REPLACEMENT CHARACTER}" in text and all(character in bytes_of for character in name):
        return bytes(bytes_of[character] for character in name).decode(errors="backslashreplace")
    return text or name
