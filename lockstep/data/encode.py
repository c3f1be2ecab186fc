"""Tokenizes texts one batch at a time, in this process or in a worker process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from lockstep.data.text import TextPart
from lockstep.data.tokenizer import END_OF_TEXT, ByteTokenizer, Tokenizer

BATCH = 512
"""Maximum number of documents tokenized at once."""
BATCH_CHARACTERS = 2**20


class Branch(NamedTuple):
    """A further sequence of a document, which shares a prefix with the document's first sequence."""

    start: int
    """Where its unshared tokens begin among the document's."""
    shared: int
    """Length of the prefix of the first sequence that precedes them; 0: the sequence is complete."""


class Encoded(NamedTuple):
    """The tokens of a document, or of a part of a very long one."""

    tokens: np.ndarray
    scored: np.ndarray | None = None
    """Whether the loss counts a token; None: all."""
    ends: bool = True
    problem: str = ""
    """For a bad document without tokens: what is wrong, where, and what to do."""
    branches: Sequence[Branch] = ()
    """The document's further sequences, longest shared prefix first; the first unshared token is never scored."""
    left_out: str = ""
    """If `problem` is no error, the name of the counter for such documents; the run continues."""


@runtime_checkable
class Encoder(Protocol):
    """Turns a source's items into tokens; pickled to the worker processes."""

    tokenizer: Tokenizer

    def encode(self, batch: list[Any]) -> list[Encoded]: ...

    def describe(self) -> dict[str, Any]:
        """Everything but the tokenizer that determines the tokens."""
        ...

    def weight(self, item: Any) -> int:
        """Approximate number of characters of an item."""
        ...


@dataclass
class TextEncoder:
    """Tokens of a text, with the end-of-text token after its last part."""

    tokenizer: Tokenizer

    def encode(self, batch: list[TextPart]) -> list[Encoded]:
        end = [] if self.tokenizer.eos_id is None else [self.tokenizer.eos_id]
        kind = token_dtype(self.tokenizer)
        try:
            encoded = self._tokens([part.text for part in batch])
        except (UnicodeEncodeError, TypeError):  # what the tokenizers raise for half a surrogate pair
            if len(batch) > 1:
                return [one for part in batch for one in self.encode([part])]
            return [Encoded(np.empty(0, kind), problem=surrogate_problem(batch[0].text))]
        return [
            Encoded(np.append(ids, end if part.ends and len(ids) else []).astype(kind), None, part.ends)
            for part, ids in zip(batch, encoded)
        ]

    def describe(self) -> dict[str, Any]:
        return {}

    def weight(self, item: TextPart) -> int:
        return len(item.text)

    def _tokens(self, texts: Sequence[str]) -> list[np.ndarray]:
        if isinstance(self.tokenizer, ByteTokenizer):
            return [
                np.array(self.tokenizer.encode(text), np.uint16)
                if END_OF_TEXT in text
                else np.frombuffer(text.encode(), dtype=np.uint8)
                for text in texts
            ]
        return [np.array(ids, dtype=np.int64) for ids in self.tokenizer.encode_batch(texts)]


def surrogate_problem(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        before = text[max(0, error.start - 20) : error.start].encode(errors="replace").decode()
        return f"a text contains half a surrogate pair after {before!r}; fix it"
    raise TypeError(f"cannot be tokenized: {text[:80]!r}")


def token_dtype(tokenizer: Tokenizer) -> type[np.unsignedinteger]:
    """The smallest type that can hold every token."""
    return np.uint16 if tokenizer.vocab_size < 2**16 else np.uint32


def batches(items: Iterable[Any], encoder: Encoder) -> Iterator[list[Any]]:
    """The items in order, in batches that end at `BATCH` items or once they reach `BATCH_CHARACTERS`."""
    batch: list[Any] = []
    weight = 0
    for item in items:
        batch.append(item)
        weight += encoder.weight(item)
        if len(batch) == BATCH or weight >= BATCH_CHARACTERS:
            yield batch
            batch, weight = [], 0
    if batch:
        yield batch
