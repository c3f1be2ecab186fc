"""Speculative decoding: a step also computes draft tokens, and accepts those that equal its draws.

A row's bits depend only on its sequence's tokens up to it, and a draw only on (seed, index) and these bits. So tokens
and log-probabilities are those of decoding one by one: no rejection sampling, and no drift.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from itertools import islice

from lockstep.generate.chunk import Chunk
from lockstep.generate.drafts.draft import Draft
from lockstep.generate.drafts.lengths import DraftLengths
from lockstep.generate.runner import Runner
from lockstep.generate.scheduler import Scheduler
from lockstep.generate.sequence import Sequence
from lockstep.generate.statistics import Statistics


class Speculation:
    """Adds draft tokens to a step's chunks. most_rows: of a step with drafts."""

    def __init__(
        self,
        draft: Draft,
        lengths: DraftLengths,
        runner: Runner,
        most_rows: int,
        scheduler: Scheduler,
        statistics: Statistics,
    ):
        self.draft, self.lengths = draft, lengths
        self._runner, self._scheduler, self._statistics = runner, scheduler, statistics
        self._vocab = runner.model.config.vocab_size
        self._most_rows = most_rows
        self._token_seconds = 0.0
        """Estimated seconds per token of the current step without drafts; 0 if unknown."""
        self._plain: dict[int, float] = {}
        """The mean seconds of recent decode steps without drafts, by the number of their sequences."""

    def extend(self, chunks: ListLike[Chunk]) -> None:
        """Drafts for the sequences that this step samples, as far as rows and free pages allow."""
        if self.lengths.skips():
            return
        sampled = [chunk for chunk in chunks if chunk.is_sampled]
        rows = sum(chunk.count for chunk in chunks)
        # A sequence's last token is drawn but never computed. A sequence that is sampled from another's row gets no
        # draft, nor does one whose logits are adjusted: they would have to be for each draft.
        limits = [
            0 if not c.rows or c.sequence.adjustment else c.sequence.params.max_tokens - c.sequence.sampled - 1
            for c in sampled
        ]
        counts = self.lengths.choose([c.sequence for c in sampled], limits, rows, max(0, self._most_rows - rows))
        drafted = [(chunk, count) for chunk, count in zip(sampled, counts) if count]
        if not drafted:
            return
        proposals = self.draft.propose([chunk.sequence for chunk, _ in drafted], [count for _, count in drafted])
        drafts = [
            self._usable(chunk.sequence, proposal, count)
            for (chunk, count), proposal in zip(drafted, proposals, strict=True)
        ]
        # Steps that compute prompts have any number of rows.
        while rows == len(chunks) and any(drafts) and not self._runner.fits(rows + sum(map(len, drafts))):
            max(drafts, key=len).pop()
        for (chunk, _), draft in zip(drafted, drafts):
            self._scheduler.extend(chunk, draft)

    def timed(self, chunks: ListLike[Chunk], seconds: float) -> None:
        """Counts the seconds of a step, including drafting, and those that its tokens would have taken without drafts.

        Not if it computed prompts, or if no step of as many sequences has run without drafts.
        """
        sequences, self._token_seconds = len(chunks), 0.0
        if any(chunk.count != 1 for chunk in chunks):
            return
        plain = self._plain.get(sequences, 0.0)
        if not any(chunk.draft_tokens for chunk in chunks):
            self._plain[sequences] = 0.9 * plain + 0.1 * seconds if plain else seconds
        elif plain:
            self._token_seconds = plain / sequences
            self._statistics.guessed_seconds += seconds
            self._statistics.unguessed_seconds += plain

    def verified(self, chunk: Chunk, accepted: int) -> None:
        """Of the chunk's draft tokens, of which there are some, the first `accepted` were accepted."""
        drafted = len(chunk.draft_tokens)
        self._statistics.count_drafts(drafted, accepted, accepted * self._token_seconds)
        self.lengths.verified(chunk.sequence, drafted, accepted)
        self.draft.verified(chunk.sequence, drafted, accepted)
        if chunk.sequence.finish_reason != "error":
            self._scheduler.accept(chunk, accepted)

    def _usable(self, sequence: Sequence, proposal: Iterable[int], most: int) -> list[int]:
        """The proposal up to the first id that is no token, or that would end the sequence."""
        tokens = [operator.index(token) for token in islice(proposal, most)]
        ends = (place for place, t in enumerate(tokens) if not 0 <= t < self._vocab or t in sequence.stop_ids)
        return tokens[: next(ends, most)]
