"""Speculative decoding: a step also computes draft tokens, and accepts those that equal its draws.

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
    """Adds draft tokens to a step's chunks.

    rows: the most rows of a step; group: the ranks that share the model, the first of which chooses the lengths; fits:
    whether a step with drafts may have so many rows.
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
        """Drafts for the sequences that this step samples, as far as rows and free pages allow."""
        self._drafting = 0.0
        skips = self.lengths.backs_off(len(chunks))
        if skips and self._group is None:
            return
        began = time.perf_counter()
        sampled = [chunk for chunk in chunks if chunk.is_sampled]
        rows = sum(chunk.count for chunk in chunks)
        sequences = [chunk.sequence for chunk in sampled]
        # A sequence's last token is drawn but never computed. A sequence that is sampled from another's row gets no
        # draft.
        limits = [c.rows and c.sequence.params.max_tokens - c.sequence.sampled - 1 for c in sampled]
        # Steps that compute prompts have any number of rows.
        fits = self._fits if rows == len(chunks) else any_rows
        room = self._rows - rows
        counts = [0] * len(sequences)
        if not skips:
            counts = self.lengths.choose(sequences, limits, rows, room, fits)
            self.lengths.chose(time.perf_counter() - began)
        counts = self._agreed(counts)
        chosen = time.perf_counter()
        places = [place for place, count in enumerate(counts) if count]
        if not places:
            if not skips:
                self.lengths.wasted()
            return
        requested = [counts[place] for place in places]
        proposals = self.draft.propose([sequences[place] for place in places], requested)
        drafts = [
            self._usable(sequences[place], proposal, count)
            for place, proposal, count in zip(places, proposals, requested, strict=True)
        ]
        _trim(drafts, rows, fits)
        for place, draft in zip(places, drafts):
            scheduler.extend(sampled[place], draft)
        ended = time.perf_counter()
        self._drafting = ended - began
        proposed = sum(len(chunk.draft_tokens) for chunk in sampled)
        self.lengths.drafted(requested, proposed, ended - chosen, len(chunks))
        if self.lengths.trying:
            self.lengths.wasted()

    def verified(self, chunk: Chunk, accepted: int) -> None:
        if chunk.draft_tokens:
            self.lengths.verified(chunk.sequence, len(chunk.draft_tokens), accepted)
            self.draft.verified(chunk.sequence, len(chunk.draft_tokens), accepted)

    def timed(self, chunks: ListLike[Chunk], seconds: float, pace: Pace = "steady") -> tuple[float, float]:
        """Records the seconds of a step, unless it computed prompts.

        Returns the seconds of the step including drafting, and those of a step without drafts; (0, 0) if it had no
        drafts, or if no step of as few rows has run so far.
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
        message = torch.tensor(counts)
        dist.broadcast(message, group=self._group, group_src=0)
        agreed: list[int] = message.tolist()
        return agreed

    def _usable(self, sequence: Sequence, proposal: Iterable[int], most: int) -> list[int]:
        """The proposal up to the first id that is no token, or that would end the sequence."""
        tokens = [operator.index(token) for token in islice(proposal, most)]
        ends = (place for place, t in enumerate(tokens) if not 0 <= t < self._vocab or t in sequence.stop_ids)
        return tokens[: next(ends, most)]


def _trim(drafts: list[list[int]], rows: int, fits: Fits) -> None:
    """Drops last tokens of the longest drafts until a step of their rows and `rows` others fits."""
    while any(drafts) and not fits(rows + sum(map(len, drafts))):
        max(drafts, key=len).pop()
