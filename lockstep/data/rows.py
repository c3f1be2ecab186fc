"""Cuts or packs documents, in a seeded order, into rows of one length, with a position exact to the token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from lockstep.data.corpus import TokenizedCorpus
from lockstep.errors import UserError


@runtime_checkable
class Documents(Protocol):
    """Tokenized documents, a window at a time: a whole corpus is one window, a stream is many."""

    def window(self, index: int) -> TokenizedCorpus | None:
        """The documents that are shuffled together; None after the last."""
        ...

    def fingerprint(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Row:
    """One row of `sequence_length` tokens. Its sequences fill it: padding is a separate sequence without targets."""

    tokens: np.ndarray
    lengths: list[int]
    """Number of tokens of each sequence in the row; positions and attention are per sequence."""
    scored: np.ndarray
    """Whether a token is a target; never the first of a sequence in the row."""
    padding: int
    """Number of padding tokens at the end."""
    shared: list[int] | None = None
    """For each sequence, the length of the prefix shared with the last complete sequence before it; None: all 0."""

    def complete_lengths(self) -> list[int]:
        """Lengths of the sequences including their shared prefixes."""
        return [length + shared for length, shared in zip(self.lengths, self.shared or [0] * len(self.lengths))]


class Piece(NamedTuple):
    """Consecutive tokens of one document, after an optional repeated prefix."""

    corpus: TokenizedCorpus
    start: int
    stop: int
    first: int = 0
    context: int = 0
    """Number of tokens from `first`, the beginning of the document, that are repeated, unscored, for the branches that
    share them."""

    @property
    def size(self) -> int:
        return self.context + self.stop - self.start

    @property
    def targets(self) -> int:
        if self.corpus.scored is None:
            return self.stop - self.start - 1
        # A branch's first token is never scored.
        return int(self.corpus.scored[self.start + 1 : self.stop].astype(bool).sum())

    def tokens(self) -> np.ndarray:
        tokens = self.corpus.read(self.start, self.stop)
        prefix = self.first, self.first + self.context
        return np.concatenate([self.corpus.read(*prefix), tokens]) if self.context else tokens

    def scored(self) -> np.ndarray:
        if self.corpus.scored is None:
            return np.ones(self.stop - self.start, dtype=bool)
        scored = self.corpus.scored[self.start : self.stop].astype(bool)
        return np.concatenate([np.zeros(self.context, dtype=bool), scored])

    def sequences(self) -> list[tuple[int, int]]:
        """For each sequence, its number of tokens in the piece, and how many more it shares with the first sequence."""
        starts = [(self.start, 0)]
        for branch in self.corpus.branches_between(self.start, self.stop):
            is_first = branch.start == self.start
            starts = [(self.start, branch.shared * bool(self.context))] if is_first else [*starts, branch]
        stops = [start for start, _ in starts[1:]] + [self.stop]
        sequences = [(stop - start, shared) for (start, shared), stop in zip(starts, stops)]
        return [(self.context, 0), *sequences] if self.context else sequences


class Rows:
    """A stream of rows, endless unless `repeat` is off: a deterministic function of (documents, seed).

    Each epoch and each window is shuffled anew. `packing` is "cut" (documents are concatenated and cut where a row
    ends) or "whole" (a document that does not fit starts the next row, and only one longer than a row is cut; pieces
    without a target are then left out). A document of several sequences is split between sequences where a row is
    full, and their shared prefix is repeated. Every rank plans every row, as pieces; only the rank that needs a row
    reads it. With `separate` off a row is one sequence.

    Raises UserError for a `sequence_length` below 2, for documents of fewer than two tokens, and for conversations of
    which no part that fits in a row has a target.
    """

    def __init__(
        self,
        documents: Documents,
        sequence_length: int,
        seed: int,
        packing: Literal["cut", "whole"] = "cut",
        separate: bool = True,
        repeat: bool = True,
    ):
        if sequence_length < 2:
            raise UserError(f"sequence_length is {sequence_length}; a sequence needs 2 tokens to predict one")
        self.documents, self.sequence_length, self.seed = documents, sequence_length, seed
        self.packing, self.separate, self.repeat = packing, separate, repeat
        # The position: token `offset` of the document at `index` in the order of `window` in `epoch`.
        self._epoch = self._window = self._index = self._offset = 0
        self._corpus = TokenizedCorpus(np.empty(0, np.uint16), np.zeros(1, np.int64))
        self._order = np.empty(0, np.int64)
        self._cut, self._longer = 0, False
        self._open()
        self._skip_without_target()
        if self.ended:
            raise self._no_target_error()

    @property
    def ended(self) -> bool:
        """Whether all documents have been used; never if they are repeated."""
        return self._epoch > 0 and not self.repeat

    @property
    def epoch(self) -> float:
        """How many times the documents have been seen; whole numbers only for a stream, whose length is unknown."""
        partial = self._index / len(self._order) if self.documents is self._corpus else 0.0
        return self._epoch + partial

    @property
    def size(self) -> tuple[int, int] | None:
        """Documents and tokens of an epoch; None for a stream, whose length is unknown."""
        return self._corpus.size if self.documents is self._corpus else None

    @property
    def counts(self) -> dict[str, int]:
        """Counts of the documents, by name; with "whole" packing also the number of documents longer than a row."""
        counts = self._corpus.counts | self._corpus.apart()
        if self.packing == "whole":
            counts["cut_documents"] = self._cut
        return counts

    def plan(self) -> list[Piece]:
        """The pieces of the next row; fewer tokens than a row with "whole" packing or at the end of the data."""
        pieces: list[Piece] = []
        room = self.sequence_length
        while room and not self.ended:
            piece, ends = self._piece(room)
            if self.packing == "whole" and pieces and not ends:
                break
            pieces.append(piece)
            room -= piece.size
            self._consume(piece, ends)
        self._skip_without_target()
        return pieces

    def _piece(self, room: int) -> tuple[Piece, bool]:
        """The next piece of at most `room` tokens, and whether the document ends with it."""
        document = self._order[self._index]
        first, end = (int(o) for o in self._corpus.offsets[document : document + 2])
        start = first + self._offset
        branches = self._corpus.branches_between(start, end)
        if not branches or (start == first and end - start <= room):
            return Piece(self._corpus, start, min(end, start + room)), end - start <= room
        here = branches[0] if branches[0].start == start else None
        context = here.shared if here else 0
        stops = [branch.start for branch in branches[1 if here else 0 :]] + [end]
        # Further sequences can follow only if this piece contains the whole first sequence.
        stops = stops if here or start == first else stops[:1]
        if fitting := [stop for stop in stops if context + stop - start <= room]:
            return Piece(self._corpus, start, fitting[-1], first, context), fitting[-1] == end
        # A sequence longer than a row is cut; any other waits for the next row.
        is_longer = room == self.sequence_length
        return Piece(self._corpus, start, min(stops[0], start + room)), is_longer and end == stops[0] <= start + room

    def _no_target_error(self) -> UserError:
        if not self._longer:
            return UserError("no conversation has a target: the assistant has no tokens to train on")
        return UserError(
            f"the conversations are longer than a row of {self.sequence_length} tokens, and once cut none has a "
            "target; give a larger --sequence-length"
        )

    def _consume(self, piece: Piece, ends: bool) -> None:
        if ends:
            self._advance()
        else:
            self._offset += piece.stop - piece.start

    def _skip_without_target(self) -> None:
        """Skips pieces without a target at the start of a row. Raises UserError if a whole epoch has no target."""
        last = self._epoch + 1
        while self.packing == "whole" and not self.ended:
            if self._epoch > last:
                raise self._no_target_error()
            piece, ends = self._piece(self.sequence_length)
            if self._corpus.scored is None or piece.targets:
                return
            self._consume(piece, ends)

    def targets(self, pieces: list[Piece]) -> int:
        """Number of tokens of a planned row that the loss counts."""
        if self.separate:
            return sum(piece.targets for piece in pieces)
        return sum(int(piece.scored().sum()) for piece in pieces) - int(bool(pieces) and pieces[0].scored()[0])

    def read(self, pieces: list[Piece]) -> Row:
        """Reads a planned row. Raises UserError for a token outside the vocabulary."""
        sequences = [sequence for piece in pieces for sequence in piece.sequences()]
        lengths, shared = [length for length, _ in sequences], [shared for _, shared in sequences]
        total, used = self.sequence_length, sum(lengths)
        tokens, scored = np.zeros(total, dtype=np.int64), np.zeros(total, dtype=bool)
        if pieces:
            np.concatenate([p.tokens() for p in pieces], out=tokens[:used], casting="unsafe")
            np.concatenate([p.scored() for p in pieces], out=scored[:used])
        if used < total:
            lengths.append(total - used)
            shared.append(0)
        if not self.separate:
            lengths, shared = [total], [0]
        scored[np.cumsum([0, *lengths[:-1]])] = False
        return Row(tokens, lengths, scored, total - used, shared if any(shared) else None)

    def state(self) -> dict[str, Any]:
        """The position; JSON-serializable."""
        place = {"epoch": self._epoch, "window": self._window, "index": self._index, "offset": self._offset}
        return {**self._settings(), **place}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from a position that `state` returned.

        Raises UserError if the data, the seed, the packing or `repeat` differ from those of `state`, and KeyError,
        TypeError or ValueError for anything that `state` did not return.
        """
        for key, value in self._settings().items():
            if state.get(key) != value:
                raise UserError(
                    f"{key}: {state.get(key)} when the run was saved, {value} now; resume with the same data, "
                    "validation_share, sequence_length, seed, packing and repeat, or start over with --overwrite"
                )
        self._epoch, self._window = int(state["epoch"]), int(state["window"])
        self._index, self._offset = int(state["index"]), int(state["offset"])
        if not self.ended:
            self._open()
            self._check_place()
            self._skip_without_target()

    def _check_place(self) -> None:
        if 0 <= self._index < len(self._order):
            document = self._order[self._index]
            first, end = self._corpus.offsets[document : document + 2]
            if 0 <= self._offset <= end - first:
                return
        raise UserError(
            f"token {self._offset} of document {self._index} of window {self._window}, where the run was saved, does "
            "not exist; resume with the same data, or start over with --overwrite"
        )

    def _settings(self) -> dict[str, Any]:
        settings = {"seed": self.seed, "sequence_length": self.sequence_length, "packing": self.packing}
        return {**self.documents.fingerprint(), **settings, "repeat": self.repeat}

    def _advance(self) -> None:
        self._index, self._offset = self._index + 1, 0
        if self._index == len(self._order):
            self._index, self._window = 0, self._window + 1
            self._open()

    def _open(self) -> None:
        """Opens the window at the position or, if it has nothing to predict, the next one that does."""
        for _ in range(2):
            while (corpus := self.documents.window(self._window)) is not None:
                if any(int(lengths.max()) >= 2 for lengths in corpus.lengths()):
                    count = len(corpus.offsets) - 1
                    draw = np.random.default_rng([self.seed, self._epoch, self._window])
                    # Every rank holds the order in memory; four bytes per document give the same order as eight.
                    dtype = np.uint32 if count < 2**32 else np.int64
                    chosen = corpus.chosen
                    self._order = np.arange(count, dtype=dtype) if chosen is None else chosen.astype(dtype)
                    draw.shuffle(self._order)
                    self._corpus = corpus
                    if corpus.branches is not None and not (self.packing == "whole" and self.separate):
                        raise UserError(
                            'conversations of several sequences need loader.packing = "whole" and '
                            "loader.separate_documents; leave both at their defaults, or give --turns whole"
                        )
                    self._cut = corpus.longer(self.sequence_length)
                    self._longer |= self._cut > 0
                    return
                self._window += 1
            self._window, self._epoch = 0, self._epoch + 1
            if self.ended and len(self._order):
                return
        raise UserError("the data contains no sequence of two tokens; there is nothing to predict")
