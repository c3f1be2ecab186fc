"""Text of sampled tokens as it grows, ending before a stop string of which no part is ever shown."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

from lockstep.data import ByteTokenizer, StreamDecoder, Tokenizer


class GrowingText:
    """The text of one sample.

    `stop_ids` are tokens that end it and have no text of their own; `length` counts the characters decoded so far.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Collection[str], stop_ids: Collection[int]):
        self._decoder = StreamDecoder(tokenizer)
        self._stop = stop
        self._stop_ids = stop_ids
        self._held = ""
        self.length = 0
        self.stopped = False
        """A stop string was found."""

    def push(self, token: int, last: bool) -> str:
        """What may be shown once `token` is there; everything up to the end or the stop string if it is the last."""
        new = "" if last and token in self._stop_ids else self._decoder.push(token)
        if last:
            new += self._decoder.finish()
        self.length += len(new)
        if self.stopped:
            return ""
        text = self._held + new
        found = [at for at in (text.find(s) for s in self._stop) if at >= 0]
        self.stopped = bool(found)
        shown = min(found) if found else len(text) if last else len(text) - self._beginning_of_stop(text)
        self._held = text[shown:]
        return text[:shown]

    def _beginning_of_stop(self, text: str) -> int:
        """How many characters at the end may turn out to begin a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """A token's text for people; `token_id:N` where it has none of its own (special tokens, parts of a character)."""
    return _own_text(tokenizer, token) or f"token_id:{token}"


def token_bytes(tokenizer: Tokenizer, token: int) -> list[int] | None:
    """A token's UTF-8 bytes, where they are known."""
    if isinstance(tokenizer, ByteTokenizer):
        return [token] if token < 256 else None
    text = _own_text(tokenizer, token)
    return list(text.encode()) if text else None


@lru_cache(maxsize=2**18)
def _own_text(tokenizer: Tokenizer, token: int) -> str:
    """Empty where a token has none. An answer with log-probabilities names the same tokens again and again."""
    text: str = tokenizer.decode([token])
    return "" if "\N{REPLACEMENT CHARACTER}" in text else text
