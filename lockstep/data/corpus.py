"""Tokenized documents, concatenated in one array."""

from __future__ import annotations

import logging
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from lockstep.data.encode import Branch, Encoded, TextEncoder, token_dtype
from lockstep.data.records import Tally
from lockstep.data.text import TextPart
from lockstep.data.tokenizer import Tokenizer
from lockstep.data.workers import encode_all
from lockstep.errors import UserError

log = logging.getLogger("lockstep")
PART, PARTS = 2**20, 32
"""Tokens per part, and the number of parts of a larger corpus that the checksum covers."""
NAMED = 10
"""Left-out examples of each kind that are named in the log."""


@dataclass
class TokenizedCorpus:
    """All documents' tokens, each document's end-of-text included; document i is `tokens[offsets[i]:offsets[i + 1]]`.

    The arrays can be memory-mapped. As `Documents` (see `rows.py`), a corpus is a single window.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    scored: np.ndarray | None = None
    """Whether the loss counts the prediction of a token; None: of all tokens."""
    branches: np.ndarray | None = None
    """Each further sequence of a document, in order, as (index of its first unshared token, number of tokens that it
    shares with the document's first sequence); None: each document is one sequence."""
    counts: dict[str, int] = field(default_factory=dict)
    """Counts from reading the data: `skipped_lines`, `empty_documents`."""
    vocab_size: int | None = None
    """Tokens from a file are checked against it as they are read; None if they come straight from a tokenizer."""
    where: str = ""
    """The folder that contains them."""
    chosen: np.ndarray | None = None
    """Indices of the documents in use; None: all. The others are held out, or in use elsewhere."""
    reference: np.ndarray | None = None
    """For preferences: the reference's log-probabilities of each document's two sequences, NaN where unknown."""

    def read(self, start: int, stop: int) -> np.ndarray:
        """`tokens[start:stop]`. Raises UserError for a token outside the vocabulary."""
        tokens = self.tokens[start:stop]
        if self.vocab_size is not None and (outside := np.flatnonzero(tokens >= self.vocab_size)).size:
            first = int(outside[0])
            raise UserError(
                f"{self.where}: token {start + first} (from 0) in tokens.bin is {tokens[first]}, outside the "
                f"vocabulary of {self.vocab_size}; the file is damaged: delete the folder and tokenize the data again"
            )
        return tokens

    def window(self, index: int) -> TokenizedCorpus | None:
        return self if index == 0 else None

    def fingerprint(self) -> dict[str, int]:
        """Distinguishes this corpus from others when a run is resumed."""
        part = {} if self.chosen is None else {"documents in use": len(self.chosen)}
        return {"documents": len(self.offsets) - 1, "tokens": int(self.offsets[-1]), "contents": self._checksum} | part

    def branches_between(self, start: int, stop: int) -> list[Branch]:
        """The branches that begin in `tokens[start:stop]`; their starts are indices of `tokens`."""
        if self.branches is None:
            return []
        first, last = np.searchsorted(self.branches[:, 0], [start, stop])
        return [Branch(int(begin), int(shared)) for begin, shared in self.branches[first:last]]

    def apart(self) -> dict[str, int]:
        """Counts of the branches and of their unshared tokens; empty without any."""
        if self.branches is None:
            return {}
        ends = self.offsets[np.searchsorted(self.offsets, self.branches[:, 0], side="right")]
        lengths = np.minimum(ends, np.append(self.branches[1:, 0], ends[-1])) - self.branches[:, 0]
        return {"answers_apart": len(self.branches), "tokens_apart": int(lengths.sum())}

    def longer(self, most: int) -> int:
        """Number of documents in use that have a sequence of more than `most` tokens."""
        if self.branches is None:
            return sum(int((lengths > most).sum()) for lengths in self.lengths())
        starts = np.concatenate([self.offsets[:-1], self.branches[:, 0]])
        order = np.argsort(starts)
        shared = np.concatenate([np.zeros(len(self.offsets) - 1, np.int64), self.branches[:, 1]])[order]
        complete = shared + np.diff(starts[order], append=self.offsets[-1])
        documents = np.unique(np.searchsorted(self.offsets, starts[order][complete > most], side="right") - 1)
        return len(documents if self.chosen is None else np.intersect1d(documents, self.chosen))

    def lengths(self) -> Iterator[np.ndarray]:
        """Lengths in tokens of the documents in use, a few hundred thousand documents at a time."""
        for start in range(0, len(self.offsets) - 1 if self.chosen is None else len(self.chosen), 2**18):
            if self.chosen is None:
                yield np.diff(self.offsets[start : start + 2**18 + 1])
            else:
                part = self.chosen[start : start + 2**18]
                yield self.offsets[part + 1] - self.offsets[part]

    @property
    def size(self) -> tuple[int, int]:
        """Number of documents in use and of their tokens."""
        if self.chosen is None:
            return len(self.offsets) - 1, int(self.offsets[-1])
        return len(self.chosen), sum(int(lengths.sum()) for lengths in self.lengths())

    @cached_property
    def _checksum(self) -> int:
        """CRC-32 of the tokens and of the loss mask; of a large corpus only of evenly spaced parts."""
        total, at_once = len(self.tokens), PART if len(self.tokens) > PARTS * PART else max(1, len(self.tokens))
        checksum = 0
        for start in np.linspace(0, total - at_once, PARTS if total > at_once else 1).astype(np.int64).tolist():
            for values in (self.tokens, self.scored):
                if values is not None:
                    checksum = zlib.crc32(np.ascontiguousarray(values[start : start + at_once]).data, checksum)
        return checksum if self.branches is None else zlib.crc32(np.ascontiguousarray(self.branches).data, checksum)


RunOnce = Callable[[Callable[[], TokenizedCorpus | None]], TokenizedCorpus | None]
"""A collective: calls its argument in one process of a run and returns the result in all of them."""


def in_this_process(read: Callable[[], TokenizedCorpus | None]) -> TokenizedCorpus | None:
    """`RunOnce` for a run in one process."""
    return read()


def collect(
    encoded: Iterable[Encoded], tally: Callable[[], Tally], dtype: type[np.unsignedinteger], skip_bad: bool = False
) -> TokenizedCorpus:
    """A corpus in memory, possibly empty. Raises UserError for a bad document unless these are skipped."""
    parts: list[Encoded] = []
    offsets, branches = drain(encoded, parts.append, tally, skip_bad)
    tokens = np.concatenate([np.empty(0, dtype), *(part.tokens for part in parts)])
    masks = [part.scored for part in parts if part.scored is not None]
    return TokenizedCorpus(tokens, offsets, np.concatenate(masks) if masks else None, branches, tally().counts())


def drain(
    encoded: Iterable[Encoded], keep: Callable[[Encoded], None], tally: Callable[[], Tally], skip_bad: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    """Passes each part with tokens to `keep`, in order; returns `offsets` and `branches` of the corpus. Empty documents
    are left out.

    `tally` returns the source's counts, which are updated here. Raises UserError for a bad document unless these are
    skipped.
    """
    offsets, branches, total = array("q", [0]), array("q"), 0
    for part in encoded:
        if part.left_out:
            counts = tally().left_out
            counts[part.left_out] = counts.get(part.left_out, 0) + 1
            if counts[part.left_out] <= NAMED:
                more = "; further ones are counted but not named" if counts[part.left_out] == NAMED else ""
                log.warning("%s; it is left out%s", part.problem, more)
            continue
        if part.problem:
            if not skip_bad:
                raise UserError(f"{part.problem}, or use --skip-bad-lines")
            tally().skipped_lines += 1
            continue
        if len(part.tokens):
            keep(part)
            for branch in part.branches:
                branches.extend((total + branch.start, branch.shared))
            total += len(part.tokens)
        if part.ends and total == offsets[-1]:
            tally().empty_documents += 1
        elif part.ends:
            offsets.append(total)
    apart = np.frombuffer(branches, dtype=np.int64).reshape(-1, 2) if branches else None
    return np.frombuffer(offsets, dtype=np.int64), apart


def tokenize_documents(documents: Iterable[str], tokenizer: Tokenizer, skip_bad: bool = False) -> TokenizedCorpus:
    """Tokenizes the documents in memory, each followed by the end-of-text token; empty ones are left out and counted.

    Raises UserError if there is no text at all, or for half a surrogate pair unless such documents are skipped.
    """
    tally = Tally()
    parts = (TextPart(text, True) for text in documents)
    corpus = collect(encode_all(parts, TextEncoder(tokenizer)), lambda: tally, token_dtype(tokenizer), skip_bad)
    if len(corpus.offsets) == 1:
        raise tally.no_documents_error("the data")
    return corpus
