"""A generator in another process, as those see it who ask it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lockstep.generate import Completion, SamplingParams
from lockstep.generate.sampling_params import FinishReason
from lockstep.rl.actors.shelf import Edition


@dataclass(eq=False)
class RemoteSample:
    """One sample of a request as far as it has come."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cut_logprobs: list[float] = field(default_factory=list)
    """Empty where the request cuts nothing."""
    versions: list[int] = field(default_factory=list)
    """Of the weights that each token was sampled from."""
    finish_reason: FinishReason | None = None
    routes: list[str] = field(default_factory=list)
    """Of each token; empty where the request does not ask for them."""

    @classmethod
    def begun(cls, completion: Completion) -> RemoteSample:
        """As far as `completion` has come; "abort": not to its end, nor has one that failed."""
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
    """A prompt, and what is known of its samples: a generator goes on where they end."""

    id: int
    prompt: list[int]
    params: SamplingParams
    """With a seed, so that all generators draw the same."""
    samples: list[RemoteSample]

    asker: object = None
    """Whose request it is, where several share a fleet."""
    begun_at: float = field(default_factory=time.monotonic)
    first_at: float = 0.0
    """When its first token was known here; 0: not yet."""
    given_at: float = 0.0
    """When a generator was first given it; 0: none was."""
    given_version: int = 0
    """Of the weights of the generator that has it, when it was given it."""

    @property
    def unfinished(self) -> int:
        return sum(sample.finish_reason is None for sample in self.samples)


class Remote(Protocol):
    """A generator that a `Fleet` asks. Nothing here waits: what comes of it the remote tells its `Reports`."""

    name: str
    """`generator_0` …"""
    room: int
    """Samples that it works on at a time; twice as many keep it busy."""

    @property
    def did(self) -> Mapping[str, float]:
        """What it has done since it began: the engine's `Statistics`, and seconds of taking weights as
        `weights_seconds`. Empty: it does not say."""

    def ask(self, request: Request) -> None:
        """Begins, or goes on with, those samples of `request` that have not ended."""

    def abort(self, request_id: int) -> None:
        """Ends a request; what is still told of it is ignored."""

    def new_weights(self, edition: Edition) -> None:
        """Has it take these weights before whatever is asked from here on."""

    def close(self) -> None:
        """Ends it, and returns once nothing of it is left. It tells nothing any more."""


class Reports(Protocol):
    """What a remote tells, from any thread: the fleet's side.

    Raises FalseClaim for what cannot be so, of which nothing is taken; the remote is `lost` then.
    """

    def sampled(self, remote: Remote, parts: Sequence[tuple[int, int, RemoteSample]]) -> None:
        """New tokens: request, number of the sample, and what follows the tokens that are known of it."""

    def has_weights(self, remote: Remote, version: int) -> None:
        """It samples with these from here on; the first time: it is ready."""

    def refused(self, remote: Remote, request_id: int, problem: str) -> None:
        """It cannot compute this request, and nor can any other."""

    def unfit(self, remote: Remote, problem: str) -> None:
        """It cannot be a generator of this run, and never will."""

    def lost(self, remote: Remote, why: str, false: bool = False) -> None:
        """It is gone, or does not do what it should: others go on with its samples. It is closed by then.

        false: it has said what cannot be so, and must not come again.
        """
