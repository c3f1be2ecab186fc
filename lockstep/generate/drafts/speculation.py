"""Speculative decoding: a step also computes drafted tokens, and keeps those that equal its own draws.

A row's bits depend only on its sequence's tokens up to it, and a draw only on (seed, index) and these bits. So tokens
and log-probabilities are those of decoding one by one: no rejection sampling, and no drift.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist

from lockstep.generate.drafts.draft import Draft
from lockstep.generate.drafts.lengths import DraftLengths, Fits, any_rows
from lockstep.generate.runner import Pace
from lockstep.generate.scheduler import Chunk, Scheduler
from lockstep.generate.sequence import Sequence


class Speculation:
    """Adds drafts to a step's chunks, and counts them.

    rows: the most rows of a step; group: the ranks that share the model, of which the first one decides; fits: whether
    a step with drafts may have so many rows.
    """

    def __init__(
        self,
        draft: Draft,
        vocab: int,
        rows: int,
        lengths: DraftLengths,
        group: dist.ProcessGroup | None,
        fits: Fits = any_rows,
    ):
        self.draft = draft
        self.lengths = lengths
        self._fits = fits
        self._vocab, self._rows, self._group = vocab, rows, group
        self._drafting = 0.0

    def extend(self, chunks: ListLike[Chunk], scheduler: Scheduler) -> None:
        """Drafts for the sequences that are sampled in this step, as far as rows and free pages allow."""
        self._drafting = 0.0
        resting = self.lengths.rests(len(chunks))
        if resting and self._group is None:
            return
        began = time.perf_counter()
        sampled = [chunk for chunk in chunks if chunk.is_sampled]
        rows = sum(chunk.count for chunk in chunks)
        sequences = [chunk.sequence for chunk in sampled]
        # The last token of a sequence is drawn but never computed. One that is sampled from another's row has none.
        limits = [c.rows and c.sequence.params.max_tokens - c.sequence.sampled - 1 for c in sampled]
        # A step that computes prompts is of a size of its own in any case.
        fits = self._fits if rows == len(chunks) else any_rows
        room = self._rows - rows
        counts = [0] * len(sequences)
        if not resting:
            counts = self.lengths.choose(sequences, limits, rows, room, fits)
            self.lengths.chose(time.perf_counter() - began)
        counts = self._agreed(counts)
        chosen = time.perf_counter()
        asked = [place for place, count in enumerate(counts) if count]
        if not asked:
            if not resting:
                self.lengths.spent_in_vain()
            return
        wanted = [counts[place] for place in asked]
        proposals = self.draft.propose([sequences[place] for place in asked], wanted)
        drafts = [
            self._usable(sequences[place], proposal, count)
            for place, proposal, count in zip(asked, proposals, wanted, strict=True)
        ]
        _trim(drafts, rows, fits)
        for place, draft in zip(asked, drafts):
            scheduler.extend(sampled[place], draft)
        ended = time.perf_counter()
        self._drafting = ended - began
        proposed = sum(len(chunk.draft_tokens) for chunk in sampled)
        self.lengths.drafted(wanted, proposed, ended - chosen, len(chunks))
        if self.lengths.trying:
            self.lengths.spent_in_vain()

    def verified(self, chunk: Chunk, accepted: int) -> None:
        if chunk.draft_tokens:
            self.lengths.verified(chunk.sequence, len(chunk.draft_tokens), accepted)
            self.draft.verified(chunk.sequence, len(chunk.draft_tokens), accepted)

    def timed(self, chunks: ListLike[Chunk], seconds: float, pace: Pace = "lasting") -> tuple[float, float]:
        """Records how long a step took. Steps that compute prompts do not tell what a row costs in decoding.

        Returns the seconds of the step including its drafting, and what a step without drafts takes; (0, 0) if it had
        none, or if no step of as few rows has run so far.
        """
        if any(chunk.count != 1 for chunk in chunks):
            return 0.0, 0.0
        times, rows = self.lengths.times, sum(chunk.rows for chunk in chunks)
        plain = 0.0
        if rows > len(chunks) and times.knows(len(chunks)):
            plain = float(times.of(np.array([len(chunks)]))[0])
        times.record(rows, seconds, pace)
        return (self._drafting + seconds, plain) if plain else (0.0, 0.0)

    def _agreed(self, counts: list[int]) -> list[int]:
        """The counts of the group's first rank: the ranks' clocks differ."""
        if self._group is None or not counts:
            return counts
        told = torch.tensor(counts)
        dist.broadcast(told, group=self._group, group_src=0)
        agreed: list[int] = told.tolist()
        return agreed

    def _usable(self, sequence: Sequence, proposal: Iterable[int], most: int) -> list[int]:
        """The proposal up to the first non-token, or a token that would be the last: nothing is computed after it."""
        tokens = [operator.index(token) for token in islice(proposal, most)]
        ends = (place for place, t in enumerate(tokens) if not 0 <= t < self._vocab or t in sequence.stop_ids)
        return tokens[: next(ends, most)]


def _trim(drafts: list[list[int]], rows: int, fits: Fits) -> None:
    """Drops last tokens of the longest drafts until their rows and `rows` others fit."""
    while any(drafts) and not fits(rows + sum(map(len, drafts))):
        max(drafts, key=len).pop()
