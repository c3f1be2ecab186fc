"""The interface between the generator pool and a generator in another process."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from lockstep.generate import Completion, SamplingParams
from lockstep.generate.sampling_params import FinishReason
from lockstep.rl.weights.server import WeightManifest


@dataclass(eq=False)
class RemoteSample:
    """One sample of a request, as far as its tokens have arrived."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    truncated_logprobs: list[float] = field(default_factory=list)
    """After top-k, top-p and min-p; empty if the request uses none of them."""
    versions: list[int] = field(default_factory=list)
    """Version of the weights that each token was sampled from."""
    finish_reason: FinishReason | None = None
    routes: list[str] = field(default_factory=list)
    """One per token; empty if not requested."""

    @classmethod
    def begun(cls, completion: Completion) -> RemoteSample:
        """A sample that continues `completion`; unfinished if that ended with "abort" or "error"."""
        reason = None if completion.finish_reason in ("abort", "error") else completion.finish_reason
        return cls(
            list(completion.token_ids),
            list(completion.logprobs),
            list(completion.truncated_logprobs),
            list(completion.versions),
            reason,
            list(completion.routes),
        )

    @property
    def sampled(self) -> int:
        return len(self.token_ids)

    def extend(self, new: RemoteSample, with_routes: bool) -> None:
        """Appends the tokens of `new`, and its end. with_routes: whether routes are kept, one per token."""
        self.token_ids += new.token_ids
        self.logprobs += new.logprobs
        self.truncated_logprobs += new.truncated_logprobs
        self.versions += new.versions
        if with_routes:  # also from a generator that reports none
            self.routes += new.routes or [""] * len(new.token_ids)
        self.finish_reason = new.finish_reason

    def completion(self) -> Completion:
        reason = self.finish_reason or "abort"
        routes = self.routes if any(self.routes) else []
        return Completion(self.token_ids, self.logprobs, reason, self.truncated_logprobs, self.versions, routes)


@dataclass(eq=False)
class Request:
    """A prompt, and its samples so far, which a generator continues."""

    id: int
    prompt: list[int]
    params: SamplingParams
    """With a seed, so that every generator would draw the same tokens."""
    samples: list[RemoteSample]
    owner: object = None
    """Which user of the pool made it."""
    generator: str = ""
    """The generator that it was sent to; empty if it waits for capacity."""
    refusal: str = ""
    """Why a generator cannot compute it."""
    created_at: float = field(default_factory=time.monotonic)
    first_token_at: float = 0.0
    """When its first token arrived; 0: not yet."""
    sent_at: float = 0.0
    """When it was first sent to a generator; 0: not yet."""
    sent_version: int = 0
    """The generator's weights version when it was sent."""

    @property
    def unfinished(self) -> int:
        return sum(sample.finish_reason is None for sample in self.samples)


class Remote(Protocol):
    """A generator of a `GeneratorPool`. No method but `close` blocks: results are reported to the pool."""

    name: str
    """`generator_0` …"""
    capacity: int
    """Samples that it decodes at a time; it is sent up to twice as many, to keep it busy."""

    @property
    def statistics(self) -> Mapping[str, float]:
        """Totals since it started: the engine's `Statistics`, and the seconds spent loading weights as
        `weights_seconds`. Empty if it does not report them."""

    def submit(self, request: Request) -> None:
        """Starts or continues the unfinished samples of `request`."""

    def abort(self, request_id: int) -> None:
        """Ends a request; later reports about it are ignored."""

    def load_weights(self, manifest: WeightManifest) -> None:
        """Has it load these weights before any later request."""

    def close(self) -> None:
        """Ends it, and returns once its threads have ended. It reports nothing after that."""


class InvalidResponse(Exception):
    """A generator sent data that none should send; the message says which."""
