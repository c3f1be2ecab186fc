"""What those who want samples need of a generator: an `Engine` here, or others elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from lockstep.generate.sampling_params import Completion, SamplingParams
from lockstep.generate.stragglers import Growing


@runtime_checkable
class Sample(Growing, Protocol):
    """One sample of a request, which goes on until it has a `finish_reason`."""

    def completion(self) -> Completion:
        """What has come of it so far."""


class Sampler(Protocol):
    """As `Engine`, whose methods say what they do."""

    @property
    def weights_version(self) -> int:
        """Of the weights that the next request is sampled from."""

    @property
    def max_positions(self) -> int:
        """Tokens of prompt and completion that the model takes."""

    @property
    def cache_tokens(self) -> int:
        """Those that the cache takes."""

    def generate(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams],
        first: int | None = None,
    ) -> list[list[Completion]]: ...

    def add(self, prompt: list[int], params: SamplingParams) -> int: ...

    def samples(self, request_id: int) -> Sequence[Sample]: ...

    def step(self) -> Any:
        """Lets samples go on."""

    def abort(self, request_id: int) -> None: ...


class Remembering(Sampler, Protocol):
    """A `Sampler` that keeps what it was asked and what came of it."""

    @property
    def asked(self) -> threading.Event:
        """Set once `generate` has asked for its samples."""

    def state(self) -> dict[str, Any]:
        """Each request's samples as far as they have come, JSON-able, by a digest of the request."""

    def count(self) -> tuple[int, int]:
        """Samples that have ended, and those that go on."""

    def close(self) -> None:
        """Ends whatever was asked here: who waits for its samples gets RunStopped."""
