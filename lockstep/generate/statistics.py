"""What an engine has done so far, in counts and seconds."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from lockstep.generate.scheduler import Chunk
from lockstep.generate.sequence import Sequence


@dataclass
class Statistics:
    """Two are equal if the same was sampled, however long it took."""

    steps: int = 0
    prompt_tokens_computed: int = 0
    prompt_tokens_reused: int = 0
    tokens_sampled: int = 0
    tokens_guessed: int = 0
    """Tokens that a draft proposed."""
    guesses_accepted: int = 0
    """Proposed tokens that were drawn."""
    runs_guessed: int = 0
    """Runs of drafts that were checked: at most one per sequence and step."""
    guessed_seconds: float = field(default=0.0, compare=False)
    """Seconds in decode steps with drafts, including the drafting, if steps of as few rows have also run without."""
    unguessed_seconds: float = field(default=0.0, compare=False)
    """Seconds their tokens would have taken one by one, estimated from the steps without drafts."""
    preemptions: int = 0
    sampling_seconds: float = field(default=0.0, compare=False)
    """In steps."""
    samples_ended: int = 0
    """Samples that were finished; the seconds below are sums over them."""
    queue_seconds: float = field(default=0.0, compare=False)
    """From the request to the first step."""
    prefill_seconds: float = field(default=0.0, compare=False)
    """From the first step to the first token."""
    decode_seconds: float = field(default=0.0, compare=False)
    """From the first token to the last."""
    tokens_decoded: int = 0
    """Tokens after the first of each sample."""

    def count_step(self, chunks: Iterable[Chunk], began: float) -> None:
        """Counts a step that began at `began` and computed these chunks, whose tokens are not appended yet."""
        now = time.perf_counter()
        self.steps += 1
        for chunk in chunks:
            sequence = chunk.sequence
            if not sequence.first_at:
                sequence.begun_at = sequence.begun_at or began
                if chunk.is_sampled:
                    sequence.first_at, sequence.sampled_before = now, sequence.sampled
            if chunk.start < sequence.prompt_length:
                self.prompt_tokens_computed += min(chunk.count, sequence.prompt_length - chunk.start)

    def count_drafts(self, drafted: int, accepted: int, spared: float) -> None:
        """spared: this sequence's share of the seconds of a step without drafts."""
        self.tokens_guessed += drafted
        self.guesses_accepted += accepted
        self.runs_guessed += 1
        self.unguessed_seconds += spared

    def count_ended(self, finished: Iterable[Sequence]) -> None:
        now = time.perf_counter()
        for sequence in finished:
            if sequence.finish_reason != "error":
                self.samples_ended += 1
                self.queue_seconds += sequence.begun_at - sequence.asked_at
                self.prefill_seconds += sequence.first_at - sequence.begun_at
                self.decode_seconds += now - sequence.first_at
                self.tokens_decoded += sequence.sampled - sequence.sampled_before - 1
