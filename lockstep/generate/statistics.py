"""An engine's counters and times."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from lockstep.generate.chunk import Chunk
from lockstep.generate.sequence import Sequence


@dataclass
class Statistics:
    """Compared without times: equal if the same work was done. Fields have the names of their metrics."""

    steps: int = 0
    prompt_tokens_computed: int = 0
    prompt_tokens_reused: int = 0
    tokens_sampled: int = 0
    tokens_guessed: int = 0
    """Tokens that a draft proposed."""
    guesses_accepted: int = 0
    """Draft tokens that were accepted."""
    runs_guessed: int = 0
    """Drafts of one or more tokens that were checked: at most one per sequence and step."""
    guessed_seconds: float = field(default=0.0, compare=False)
    """Seconds in decode steps with drafts, including drafting; only if steps of as few rows have run without drafts."""
    unguessed_seconds: float = field(default=0.0, compare=False)
    """Seconds that the tokens of these steps would have taken without drafts, estimated from steps without drafts."""
    preemptions: int = 0
    sampling_seconds: float = field(default=0.0, compare=False)
    """Seconds in steps."""
    packing_seconds: float = field(default=0.0, compare=False)
    """Seconds of these in which weights were packed, or quantized, since they had changed."""
    samples_ended: int = 0
    """Finished samples; the seconds below are sums over them."""
    queue_seconds: float = field(default=0.0, compare=False)
    """From the request to the first step."""
    prefill_seconds: float = field(default=0.0, compare=False)
    """From the first step to the first token."""
    decode_seconds: float = field(default=0.0, compare=False)
    """From the first token to the last."""
    tokens_decoded: int = 0
    """Tokens after the first of each sample."""

    def count_step(self, chunks: Iterable[Chunk], began: float) -> None:
        """Counts a step that began at `began` and computed these chunks; call before the sampled tokens are
        appended."""
        now = time.perf_counter()
        self.steps += 1
        for chunk in chunks:
            sequence = chunk.sequence
            if not sequence.first_token_at:
                sequence.started_at = sequence.started_at or began
                if chunk.is_sampled:
                    sequence.first_token_at, sequence.sampled_before = now, sequence.sampled
            if chunk.start < sequence.prompt_length:
                self.prompt_tokens_computed += min(chunk.count, sequence.prompt_length - chunk.start)

    def count_drafts(self, drafted: int, accepted: int, saved: float) -> None:
        """saved: seconds that the accepted tokens would have taken without drafts."""
        self.tokens_guessed += drafted
        self.guesses_accepted += accepted
        self.runs_guessed += 1
        self.unguessed_seconds += saved

    def count_ended(self, finished: Iterable[Sequence]) -> None:
        now = time.perf_counter()
        for sequence in finished:
            if sequence.finish_reason != "error":
                self.samples_ended += 1
                self.queue_seconds += sequence.started_at - sequence.requested_at
                self.prefill_seconds += sequence.first_token_at - sequence.started_at
                self.decode_seconds += now - sequence.first_token_at
                self.tokens_decoded += sequence.sampled - sequence.sampled_before - 1
