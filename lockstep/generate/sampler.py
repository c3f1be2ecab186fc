"""The interface of a generator: a local `Engine`, or remote ones."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from lockstep.generate.sampling_params import Completion, SamplingParams
from lockstep.generate.stragglers import Growing


@runtime_checkable
class Sample(Growing, Protocol):
    """One sample of a request, which grows until it has a `finish_reason`."""

    def completion(self) -> Completion:
        """What has been sampled so far."""


class Sampler(Protocol):
    """The interface of `Engine`, whose methods document it."""

    @property
    def weights_version(self) -> int:
        """The version of the weights that the next request is sampled from."""

    @property
    def max_positions(self) -> int:
        """The most tokens of prompt and completion together that the model supports."""

    @property
    def cache_tokens(self) -> int:
        """The capacity of the cache in tokens."""

    def generate(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams],
        first: int | None = None,
    ) -> list[list[Completion]]: ...

    def add(self, prompt: list[int], params: SamplingParams) -> int: ...

    def samples(self, request_id: int) -> Sequence[Sample]: ...

    def step(self) -> Any:
        """Advances the samples."""

    def abort(self, request_id: int) -> None: ...


class CachingSampler(Sampler, Protocol):
    """A `Sampler` that keeps its requests and their samples, and can continue from them."""

    @property
    def asked(self) -> threading.Event:
        """Set once `generate` has requested its samples."""

    def state(self) -> dict[str, Any]:
        """Each request's samples so far, JSON-serializable, keyed by a digest of the request."""

    def count(self) -> tuple[int, int]:
        """The numbers of finished and unfinished samples."""

    def close(self) -> None:
        """Ends all requests: callers waiting for their samples get RunStopped."""
