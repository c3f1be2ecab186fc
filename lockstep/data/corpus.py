"""Tokenised documents side by side in one array."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from lockstep.data.tokenizer import ByteTokenizer, Tokenizer
from lockstep.errors import UserError

BATCH = 512
"""Documents that are tokenised at once."""


@dataclass
class TokenizedCorpus:
    """All documents' tokens, each document's end-of-text included; document i is `tokens[offsets[i]:offsets[i + 1]]`.

    The arrays may be memory-mapped. A corpus is also the one window of itself (see `Documents` in `rows.py`).
    """

    tokens: np.ndarray
    offsets: np.ndarray
    scored: np.ndarray | None = None
    """Whether the loss counts a token, as a prediction from those before it; None: all of them."""
    counts: dict[str, int] = field(default_factory=dict)
    """What was met while reading: `skipped_lines`, `empty_documents`."""

    def window(self, index: int) -> TokenizedCorpus | None:
        return self if index == 0 else None

    def fingerprint(self) -> dict[str, int]:
        """Tells this corpus from another one when a run is resumed."""
        return {"documents": len(self.offsets) - 1, "tokens": int(self.offsets[-1])}


def tokenize_documents(
    documents: Iterable[str], tokenizer: Tokenizer, limit_tokens: int | None = None
) -> TokenizedCorpus:
    """Tokenises every document and ends it with the tokenizer's end-of-text token; empty ones are left out and counted.

    Stops after the document that reaches `limit_tokens`, where given. Raises UserError if there is no text at all.
    """
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    kind = token_dtype(tokenizer)
    parts: list[np.ndarray] = []
    total = empty = 0
    for ids in _encoded(documents, tokenizer):
        if not len(ids):
            empty += 1
            continue
        parts.append(np.append(ids, end).astype(kind))
        total += len(parts[-1])
        if limit_tokens is not None and total >= limit_tokens:
            break
    if not parts:
        raise UserError("the data holds no text; every document is empty")
    offsets = np.array([0, *(len(p) for p in parts)]).cumsum()
    return TokenizedCorpus(np.concatenate(parts), offsets, counts={"empty_documents": empty})


def token_dtype(tokenizer: Tokenizer) -> type[np.unsignedinteger]:
    """The smallest type that holds every token."""
    return np.uint16 if tokenizer.vocab_size < 2**16 else np.uint32


def _encoded(documents: Iterable[str], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    remaining = iter(documents)
    while batch := list(itertools.islice(remaining, BATCH)):
        if isinstance(tokenizer, ByteTokenizer):
            yield from (np.frombuffer(text.encode(), dtype=np.uint8) for text in batch)
        else:
            yield from (np.array(ids, dtype=np.int64) for ids in tokenizer.encode_batch(batch))
