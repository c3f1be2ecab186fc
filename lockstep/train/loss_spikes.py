"""Loss spikes: losses far above the recent ones."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median, pstdev
from typing import Any

from lockstep.checkpoint.checkpoints import Checkpoints
from lockstep.config import FaultConfig
from lockstep.errors import RunStopped, UserError
from lockstep.observe import log

WINDOW = 100
"""Steps that a loss is compared with."""
FEWEST = 20
"""Without this many losses before it, no loss is a spike."""
ROLLBACKS = 3
"""Rollbacks to the same checkpoint before the run ends."""


class LossSpikes:
    """A `StepObserver` that detects spikes from the losses before them; the same on every rank, as all see the loss."""

    prefix = ""

    def __init__(self, config: FaultConfig):
        self.config = config
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._rollbacks: dict[int, int] = {}
        self._spike = False

    def state(self) -> list[float]:
        """The state for a checkpoint, so that a resumed run finds the same spikes; JSON-serializable."""
        return list(self._losses)

    def restore(self, state: Iterable[float] | None) -> None:
        """The inverse of `state`."""
        self._losses = deque(map(float, state or ()), maxlen=WINDOW)

    def observe(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Looks for a spike in the step's loss; adds no metrics."""
        self._spike = self.found(step, metrics["loss"])
        return {}

    def ending(self) -> None:
        """No spike ends the run here; too many rollbacks do (`rewind`)."""

    def found(self, step: int, loss: float) -> bool:
        """Whether `loss` is `spike_deviations` standard deviations above the median of recent losses. Spikes are not
        kept."""
        if not self.config.spike_deviations or not math.isfinite(loss):
            return False
        if len(self._losses) >= FEWEST:
            middle, spread = median(self._losses), pstdev(self._losses)
            if loss > middle + self.config.spike_deviations * spread:
                log.warning("step %d: loss spike of %.4g; the median was %.4g ± %.2g", step, loss, middle, spread)
                return True
        self._losses.append(loss)
        return False

    def rewind(self, checkpoints: Checkpoints) -> int | None:
        """After a spike, restores trainer and random generators from the newest checkpoint, and returns its step.

        None if there is no spike or it only causes a warning, or if there is no checkpoint yet. Raises RunStopped if
        going back to the same checkpoint has not helped.
        """
        if not self._spike or self.config.on_spike != "rollback":
            return None
        checkpoints.wait()
        try:
            state = checkpoints.resume()
        except UserError as error:
            log.warning("%s", error)
            state = None
        if state is None:
            log.warning("there is no checkpoint to roll back to; the run continues")
            return None
        step: int = state["step"]
        self._rollbacks[step] = self._rollbacks.get(step, 0) + 1
        if self._rollbacks[step] > ROLLBACKS:
            raise RunStopped(
                f"after step {step} the loss spiked {ROLLBACKS + 1} times, with different data each time; lower "
                "train.learning_rate, or raise faults.spike_deviations, and continue with --resume",
                exit_code=1,
            )
        log.warning("rolled back to step %d; continuing with the data after the spike", step)
        return step
