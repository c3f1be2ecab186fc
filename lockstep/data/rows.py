"""Documents in a seeded order, cut or packed into rows of one length, with a position exact to the token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from lockstep.data.corpus import CONTENTS, TokenizedCorpus
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
    """How many tokens each sequence has here: each has its own positions, and attention stays within it."""
    scored: np.ndarray
    """Whether a token is a target; never a sequence's first here."""
    padding: int
    """Number of padding tokens at the end."""
    shared: list[int] | None = None
    """How many first tokens of the last complete sequence before it each sequence begins with; None: none does."""

    def complete_lengths(self) -> list[int]:
        """Lengths of the sequences with what they share."""
        return [length + shared for length, shared in zip(self.lengths, self.shared or [0] * len(self.lengths))]


class Piece(NamedTuple):
    """Consecutive tokens of one document, and what comes before them."""

    corpus: TokenizedCorpus
    start: int
    stop: int
    first: int = 0
    context: int = 0
    """How many tokens from `first`, where the document begins, are repeated, unscored, for the branches that share
    them."""

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
        own = self.corpus.read(self.start, self.stop)
        before = self.first, self.first + self.context
        return np.concatenate([self.corpus.read(*before), own]) if self.context else own

    def scored(self) -> np.ndarray:
        if self.corpus.scored is None:
            return np.ones(self.stop - self.start, dtype=bool)
        own = self.corpus.scored[self.start : self.stop].astype(bool)
        return np.concatenate([np.zeros(self.context, dtype=bool), own])

    def sequences(self) -> list[tuple[int, int]]:
        """For each sequence how many tokens are in the piece, and how many more it shares with the first of them."""
        starts = [(self.start, 0)]
        for branch in self.corpus.branches_between(self.start, self.stop):
            is_first = branch.start == self.start
            starts = [(self.start, branch.shared * bool(self.context))] if is_first else [*starts, branch]
        stops = [start for start, _ in starts[1:]] + [self.stop]
        own = [(stop - start, shared) for (start, shared), stop in zip(starts, stops)]
        return [(self.context, 0), *own] if self.context else own


class Rows:
    """A stream of rows, endless unless `repeat` is off: a function of (documents, seed).

    Each epoch and each window has its own order. `packing` is "cut" (documents one after the other, cut where a
    row ends) or "whole" (a document that no longer fits starts the next row, and only one longer than a row is cut).
    Of a conversation that is longer than a row, pieces without a target are then left out. A document of several
    sequences is divided between them where a row is full, and what they share is then repeated. A row is first planned,
    as pieces, and read by the rank that needs it. With `separate` off a row is one sequence.

    Raises UserError for a `sequence_length` below 2, for documents without two tokens, and for conversations of which
    no part that fits in a row has a target.
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
        # What comes next: token `offset` of the document at `index` in the order of `window` in `epoch`.
        self._epoch = self._window = self._index = self._offset = 0
        self._corpus = TokenizedCorpus(np.empty(0, np.uint16), np.zeros(1, np.int64))
        self._order = np.empty(0, np.int64)
        self._cut, self._longer = 0, False
        self._open()
        self._leave_out()
        if self.ended:
            raise self._nothing()

    @property
    def ended(self) -> bool:
        """Whether all documents have been used, which only happens if they are not repeated."""
        return self._epoch > 0 and not self.repeat

    @property
    def epoch(self) -> float:
        """How many times the documents have been seen; only whole times for a stream, whose length is unknown."""
        partial = self._index / len(self._order) if self.documents is self._corpus else 0.0
        return self._epoch + partial

    @property
    def size(self) -> tuple[int, int] | None:
        """Documents and tokens of an epoch; None for a stream, whose length is unknown."""
        return self._corpus.size if self.documents is self._corpus else None

    @property
    def counts(self) -> dict[str, int]:
        """What was found in the documents, by name; for whole documents also how many are too long for a row."""
        counts = self._corpus.counts | self._corpus.apart()
        if self.packing == "whole":
            counts["cut_documents"] = self._cut
        return counts

    def plan(self) -> list[Piece]:
        """The pieces of the next row; fewer tokens than a row if documents are kept whole or end."""
        pieces: list[Piece] = []
        room = self.sequence_length
        while room and not self.ended:
            piece, ends = self._piece(room)
            if self.packing == "whole" and pieces and not ends:
                break
            pieces.append(piece)
            room -= piece.size
            self._pass(piece, ends)
        self._leave_out()
        return pieces

    def _piece(self, room: int) -> tuple[Piece, bool]:
        """What comes next of a document, at most `room` tokens, and whether the document ends with it."""
        document = self._order[self._index]
        first, end = (int(o) for o in self._corpus.offsets[document : document + 2])
        start = first + self._offset
        branches = self._corpus.branches_between(start, end)
        if not branches or (start == first and end - start <= room):
            return Piece(self._corpus, start, min(end, start + room)), end - start <= room
        here = branches[0] if branches[0].start == start else None
        context = here.shared if here else 0
        stops = [branch.start for branch in branches[1 if here else 0 :]] + [end]
        # The sequences that follow have the first one only if all of it is in this piece.
        stops = stops if here or start == first else stops[:1]
        if fitting := [stop for stop in stops if context + stop - start <= room]:
            return Piece(self._corpus, start, fitting[-1], first, context), fitting[-1] == end
        # Longer than a row, it is cut; else it waits for the next.
        is_longer = room == self.sequence_length
        return Piece(self._corpus, start, min(stops[0], start + room)), is_longer and end == stops[0] <= start + room

    def _nothing(self) -> UserError:
        if not self._longer:
            return UserError("no conversation has a target: the assistant says nothing that could be learned")
        return UserError(
            f"the conversations are longer than a row of {self.sequence_length} tokens, and cut into rows none has a "
            "target; give a larger --sequence-length"
        )

    def _pass(self, piece: Piece, ends: bool) -> None:
        if ends:
            self._advance()
        else:
            self._offset += piece.stop - piece.start

    def _leave_out(self) -> None:
        """Passes what has no target, so that each row begins with one. Raises UserError if a whole epoch has none."""
        last = self._epoch + 1
        while self.packing == "whole" and not self.ended:
            if self._epoch > last:
                raise self._nothing()
            piece, ends = self._piece(self.sequence_length)
            if self._corpus.scored is None or piece.targets:
                return
            self._pass(piece, ends)

    def targets(self, pieces: list[Piece]) -> int:
        """Tokens of a planned row that the loss counts."""
        if self.separate:
            return sum(piece.targets for piece in pieces)
        return sum(int(piece.scored().sum()) for piece in pieces) - int(bool(pieces) and pieces[0].scored()[0])

    def read(self, pieces: list[Piece]) -> Row:
        """A planned row's tokens. Raises UserError if a file has one outside the vocabulary."""
        sequences = [sequence for piece in pieces for sequence in piece.sequences()]
        lengths, shared = [length for length, _ in sequences], [shared for _, shared in sequences]
        total, held = self.sequence_length, sum(lengths)
        tokens, scored = np.zeros(total, dtype=np.int64), np.zeros(total, dtype=bool)
        if pieces:
            np.concatenate([p.tokens() for p in pieces], out=tokens[:held], casting="unsafe")
            np.concatenate([p.scored() for p in pieces], out=scored[:held])
        if held < total:
            lengths.append(total - held)
            shared.append(0)
        if not self.separate:
            lengths, shared = [total], [0]
        scored[np.cumsum([0, *lengths[:-1]])] = False
        return Row(tokens, lengths, scored, total - held, shared if any(shared) else None)

    def state(self) -> dict[str, Any]:
        """The whole position; JSON-able."""
        place = {"epoch": self._epoch, "window": self._window, "index": self._index, "offset": self._offset}
        return {**self._settings(), **place}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues after the rows taken before `state`.

        Raises UserError if the data, the seed, the packing or `repeat` are not those of `state`: the rows would differ.
        KeyError, TypeError or ValueError for anything that `state` has not returned.
        """
        for key, value in self._settings().items():
            if state.get(key, value if key == CONTENTS else None) != value:
                raise UserError(
                    f"{key}: {state.get(key)} when the run was saved, {value} now; resume with the same data, "
                    "validation_share, sequence_length, seed, packing and repeat, or start over with --overwrite"
                )
        self._epoch, self._window = int(state["epoch"]), int(state["window"])
        self._index, self._offset = int(state["index"]), int(state["offset"])
        if not self.ended:
            self._open()
            self._check_place()
            self._leave_out()

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
        own = {"seed": self.seed, "sequence_length": self.sequence_length, "packing": self.packing}
        own |= {"repeat": self.repeat}
        return {**self.documents.fingerprint(), **own}

    def _advance(self) -> None:
        self._index, self._offset = self._index + 1, 0
        if self._index == len(self._order):
            self._index, self._window = 0, self._window + 1
            self._open()

    def _open(self) -> None:
        """Opens the window at the position or, if it has nothing to predict, the next one that has."""
        for _ in range(2):
            while (corpus := self.documents.window(self._window)) is not None:
                if any(int(lengths.max()) >= 2 for lengths in corpus.lengths()):
                    count = len(corpus.offsets) - 1
                    draw = np.random.default_rng([self.seed, self._epoch, self._window])
                    # Every rank has it in memory: four bytes per document, in the same order as with eight.
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
