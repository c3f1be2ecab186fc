"""What a run's loop knows of its task: one step, one validation, and what a checkpoint must include."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from lockstep.checkpoint.checkpoints import Checkpoints

Metrics = dict[str, Any]


@runtime_checkable
class Resumable(Protocol):
    """A part of a run that a checkpoint includes."""

    def state(self) -> Any:
        """JSON, equal on all ranks: the state after the last complete step, whatever has begun since."""
        ...

    def restore(self, state: Any) -> None:
        """Continues from `state`, which is None if the checkpoint does not include it.

        Raises UserError if the run must not continue from it, and anything else if it is damaged.
        """
        ...


@runtime_checkable
class StepObserver(Protocol):
    """Watches a run's metrics, and may rewind or end the run."""

    prefix: str
    """Of the metrics that `observe` adds."""

    def observe(self, step: int, metrics: Mapping[str, Any]) -> Metrics:
        """Sees the metrics of a finished step, or of a validation before the first; returns metrics to add to them."""
        ...

    def rewind(self, checkpoints: Checkpoints) -> int | None:
        """Restores an earlier checkpoint's trainer if the last step calls for it; returns its step, else None."""
        ...

    def ending(self) -> BaseException | None:
        """The error that ends the run after the last step, if it must not continue."""
        ...


@runtime_checkable
class Task(Protocol):
    """One step of a run, and nothing of signals, resuming, schedules, replay or progress bars."""

    @property
    def resumables(self) -> Mapping[str, Resumable]:
        """By their names in a checkpoint's state."""
        ...

    @property
    def observers(self) -> Sequence[StepObserver]: ...

    def step(self, step: int) -> Metrics:
        """Makes one step. Raises Interrupted before its first update, if a signal interrupts it on any rank."""
        ...

    def record(self, step: int) -> None:
        """Writes what the step has produced besides its metrics, which are written by then."""
        ...

    @property
    def ended(self) -> bool:
        """Whether the data has ended, so that no step follows."""
        ...

    def validates_after(self, step: int) -> bool:
        """Whether a validation follows the step; 0: whether one precedes the first step. Always after the last."""
        ...

    def validate(self, step: int) -> Metrics:
        """Validates the weights after `step`. Raises Interrupted on all ranks if a signal interrupts it on any."""
        ...

    def shown(self, metrics: Metrics) -> dict[str, float]:
        """What the progress bar shows after a step."""
        ...
