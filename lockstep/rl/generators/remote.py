"""A generator in another process, as its callers see it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lockstep.generate import Completion, SamplingParams
from lockstep.generate.sampling_params import FinishReason
from lockstep.rl.weights.server import WeightManifest


@dataclass(eq=False)
class RemoteSample:
    """One sample of a request, as far as it is known."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cut_logprobs: list[float] = field(default_factory=list)
    """Empty if the request cuts nothing."""
    versions: list[int] = field(default_factory=list)
    """Version of the weights that each token was sampled from."""
    finish_reason: FinishReason | None = None
    routes: list[str] = field(default_factory=list)
    """One per token; empty if the request does not ask for them."""

    @classmethod
    def begun(cls, completion: Completion) -> RemoteSample:
        """Continues `completion`; one with "abort" or "error" is unfinished."""
        reason = None if completion.finish_reason in ("abort", "error") else completion.finish_reason
        return cls(
            list(completion.token_ids),
            list(completion.logprobs),
            list(completion.cut_logprobs),
            list(completion.versions),
            reason,
            list(completion.routes),
        )

    @property
    def sampled(self) -> int:
        return len(self.token_ids)

    def completion(self) -> Completion:
        reason = self.finish_reason or "abort"
        routes = self.routes if any(self.routes) else []
        return Completion(self.token_ids, self.logprobs, reason, self.cut_logprobs, self.versions, routes)


@dataclass(eq=False)
class Request:
    """A prompt, and what is known of its samples, which a generator continues."""

    id: int
    prompt: list[int]
    params: SamplingParams
    """With a seed, so that all generators draw the same."""
    samples: list[RemoteSample]

    asker: object = None
    """Whose request it is, if several share a fleet."""
    begun_at: float = field(default_factory=time.monotonic)
    first_at: float = 0.0
    """When its first token was known here; 0: not yet."""
    given_at: float = 0.0
    """When it was first sent to a generator; 0: not yet."""
    given_version: int = 0
    """Weights version of the generator that has it, at the time when it was sent."""

    @property
    def unfinished(self) -> int:
        return sum(sample.finish_reason is None for sample in self.samples)


class Remote(Protocol):
    """A generator of a `GeneratorPool`. No method waits: the remote tells its `Reports` about results."""

    name: str
    """`generator_0` …"""
    room: int
    """Samples that it works on at a time; twice as many keep it busy."""

    @property
    def did(self) -> Mapping[str, float]:
        """What it has done since it started: the engine's `Statistics`, and seconds spent taking weights as
        `weights_seconds`. Empty: it does not say."""

    def ask(self, request: Request) -> None:
        """Starts or continues the unfinished samples of `request`."""

    def abort(self, request_id: int) -> None:
        """Ends a request; later reports about it are ignored."""

    def load_weights(self, manifest: WeightManifest) -> None:
        """Has it take these weights before any later request."""

    def close(self) -> None:
        """Ends it, and returns once nothing of it is left. It reports nothing after that."""


class Reports(Protocol):
    """What a remote reports, from any thread: the fleet's side.

    Raises InvalidResponse for invalid data, none of which is used; the remote is `lost` then.
    """

    def sampled(self, remote: Remote, parts: Sequence[tuple[int, int, RemoteSample]]) -> None:
        """New tokens: request, index of the sample, and what follows the tokens already known of it."""

    def has_weights(self, remote: Remote, version: int) -> None:
        """It samples with these weights from here on; the first time, this means that it is ready."""

    def refused(self, remote: Remote, request_id: int, problem: str) -> None:
        """It cannot compute this request, and neither can any other."""

    def unfit(self, remote: Remote, problem: str) -> None:
        """It cannot be a generator of this run, and never will."""

    def lost(self, remote: Remote, why: str, false: bool = False) -> None:
        """It is gone, or misbehaves: others continue its samples. It is closed by then.

        false: it has sent invalid data, and must not join again.
        """
