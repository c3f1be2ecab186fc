"""Tokenised documents in a seeded order, one optimizer step at a time, resumable to the document."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lockstep.data.tokenizer import ByteTokenizer, Tokenizer
from lockstep.errors import UserError

BATCH = 512


@dataclass
class TokenizedCorpus:
    """All documents' tokens in one array, each document's end-of-text included; document i is
    `tokens[offsets[i]:offsets[i + 1]]`."""

    tokens: np.ndarray
    offsets: np.ndarray


def tokenize_documents(
    documents: Iterable[str], tokenizer: Tokenizer, limit_tokens: int | None = None
) -> TokenizedCorpus:
    """Tokenises every document and ends it with the tokenizer's end-of-text token.

    Stops after the document that reaches `limit_tokens`, where given. Raises UserError if there is no text at all.
    """
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    kind = np.uint16 if tokenizer.vocab_size < 2**16 else np.uint32
    parts: list[np.ndarray] = []
    total = 0
    remaining = iter(documents)
    while (limit_tokens is None or total < limit_tokens) and (batch := list(itertools.islice(remaining, BATCH))):
        if isinstance(tokenizer, ByteTokenizer):
            encoded = [np.frombuffer(text.encode(), dtype=np.uint8) for text in batch]
        else:
            encoded = [np.array(ids) for ids in tokenizer.encode_batch(batch)]
        for ids in encoded:
            if len(ids) and (limit_tokens is None or total < limit_tokens):
                parts.append(np.append(ids, end).astype(kind))
                total += len(parts[-1])
    if not parts:
        raise UserError("the data holds no text; every document is empty")
    return TokenizedCorpus(np.concatenate(parts), np.array([0, *(len(p) for p in parts)]).cumsum())


class TokenLoader:
    """Sequences of each step, drawn from the corpus in a new order every epoch.

    A document longer than `sequence_length` is cut into pieces; pieces are shuffled by a function of (seed, epoch)
    alone, and a step takes as many as fit into `tokens_per_step`, at least one.

    Raises UserError for a `sequence_length` below 2 and for data without a sequence of two tokens.
    """

    def __init__(self, corpus: TokenizedCorpus, sequence_length: int, tokens_per_step: int, seed: int):
        if sequence_length < 2:
            raise UserError(f"sequence_length is {sequence_length}; a sequence needs 2 tokens to predict one")
        self.tokens = corpus.tokens
        self.tokens_per_step = tokens_per_step
        self.seed = seed
        lengths = np.diff(corpus.offsets)
        pieces = -(-lengths // sequence_length)
        document = np.repeat(np.arange(len(lengths)), pieces)
        index = np.arange(len(document)) - np.repeat(pieces.cumsum() - pieces, pieces)
        self.starts = corpus.offsets[:-1][document] + index * sequence_length
        self.ends = np.minimum(self.starts + sequence_length, corpus.offsets[1:][document])
        usable = self.ends - self.starts >= 2
        self.starts, self.ends = self.starts[usable], self.ends[usable]
        if not len(self.starts):
            raise UserError("the data holds no sequence of two tokens; there is nothing to predict")
        self.position = 0
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0))

    def next(self) -> list[list[int]]:
        """The next step's sequences."""
        chosen: list[list[int]] = []
        total = 0
        while True:
            piece = self._piece(self.position)
            length = int(self.ends[piece] - self.starts[piece])
            if chosen and total + length > self.tokens_per_step:
                return chosen
            chosen.append(self.tokens[self.starts[piece] : self.ends[piece]].tolist())
            total += length
            self.position += 1

    @property
    def epoch(self) -> float:
        """Times that the corpus has been seen."""
        return self.position / len(self.starts)

    def state(self) -> dict[str, int]:
        """What `load_state` of a loader over the same data needs to go on from here; JSON-able."""
        return {"position": self.position, "sequences": len(self.starts), "seed": self.seed}

    def load_state(self, state: dict[str, int]) -> None:
        """Goes on with the batch after those taken before `state`.

        Raises UserError if the data or the seed are not those of `state`: the order would be another one.
        """
        own = self.state()
        for key in ("sequences", "seed"):
            if state[key] != own[key]:
                raise UserError(
                    f"{key}: {state[key]} when the run was saved, {own[key]} now; resume with the same data, "
                    "sequence_length and seed, or start again with --overwrite"
                )
        self.position = state["position"]

    def _piece(self, position: int) -> int:
        epoch, index = divmod(position, len(self.starts))
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self.seed, epoch]).permutation(len(self.starts)))
        return int(self._order[1][index])
