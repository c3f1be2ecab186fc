"""The interface of a run's generators to its loop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from lockstep.generate.sampler import CachingSampler, Sampler
from lockstep.model import Decoder, ScoringModel


class Generators(Protocol):
    """A run's generators, as seen from each training rank."""

    @property
    def sampler(self) -> Sampler:
        """The sampler that this rank uses."""

    @property
    def caching_sampler(self) -> Callable[[dict[str, Any]], CachingSampler] | None:
        """Makes samplers that continue from a saved `state`, for steps sampled ahead; None if nothing can be."""

    @property
    def policy(self) -> ScoringModel:
        """The newest weights, readable on this rank alone: for a value function, or a reference that is the policy
        without its adapter."""

    @property
    def policy_while_paused(self) -> Decoder | None:
        """The policy between `pause` and `load_weights`, to explain parity failures; None if its memory was freed.

        Tensors shared with the trainer have the values of the last update, copies those from before the updates.
        """

    @property
    def progress(self) -> int:
        """A counter that increases while this rank's sampler receives samples."""

    def load_weights(self, version: int) -> None:
        """From here on, samples come from the trainer's current weights. All ranks call it.

        Raises RunStopped if they do not arrive intact, or no generator is left.
        """

    def pause(self) -> None:
        """Until `load_weights`, the training ranks neither sample nor score with `policy`: its memory may be freed."""

    def conversing(self) -> AbstractContextManager[bool]:
        """Yields whether conversations on this rank use the sampler while the context is open. All ranks enter it.

        On ranks where it yields False, it has already followed the driver of its tensor group to the end.
        """

    def metrics(self) -> dict[str, float]:
        """What each generator did since the last call. All ranks call it."""

    def trace_events(self) -> list[dict[str, Any]]:
        """The generators' activity, as Chrome trace events."""
