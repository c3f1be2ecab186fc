"""Losses that leap out of their recent course."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median, pstdev
from typing import Any

from lockstep.checkpoint.checkpoints import Checkpoints
from lockstep.config import FaultConfig
from lockstep.errors import RunStopped, UserError
from lockstep.observe import log

WINDOW = 100
"""Steps that a loss is compared with."""
FEWEST = 20
"""Without so many before it, no loss is a spike."""
ROLLBACKS = 3
"""To one checkpoint, before the run ends."""


class LossSpikes:
    """Tells a spike from the losses before it; the same on every rank, for they all see the run's loss."""

    def __init__(self, config: FaultConfig):
        self.config = config
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._rollbacks: dict[int, int] = {}

    def state(self) -> list[float]:
        """What a checkpoint keeps, so that a resumed run finds the same spikes; JSON-able."""
        return list(self._losses)

    def load_state(self, losses: Iterable[float]) -> None:
        """The inverse of `state`."""
        self._losses = deque(map(float, losses), maxlen=WINDOW)

    def found(self, step: int, loss: float) -> bool:
        """Whether `loss` is this many standard deviations above the median of the last steps'. A spike is not kept."""
        if not self.config.spike_deviations or not math.isfinite(loss):
            return False
        if len(self._losses) >= FEWEST:
            middle, spread = median(self._losses), pstdev(self._losses)
            if loss > middle + self.config.spike_deviations * spread:
                log.warning("step %d: the loss spikes at %.4g; its median was %.4g ± %.2g", step, loss, middle, spread)
                return True
        self._losses.append(loss)
        return False

    def roll_back(self, checkpoints: Checkpoints) -> dict[str, Any] | None:
        """Puts trainer and random generators back to the newest checkpoint, and returns its state.

        None where spikes are only warned of, or where there is no checkpoint yet. Raises RunStopped where going back to
        the same one has not helped.
        """
        if self.config.on_spike != "rollback":
            return None
        checkpoints.wait()
        try:
            state = checkpoints.resume()
        except UserError as error:
            log.warning("%s", error)
            state = None
        if state is None:
            log.warning("there is no checkpoint to go back to; the run goes on")
            return None
        step = state["step"]
        self._rollbacks[step] = self._rollbacks.get(step, 0) + 1
        if self._rollbacks[step] > ROLLBACKS:
            raise RunStopped(
                f"after step {step} the loss spiked {ROLLBACKS + 1} times, with other data each time; lower "
                "train.learning_rate, or raise faults.spike_deviations, and continue with --resume",
                exit_code=1,
            )
        log.warning("back to step %d, and on with the data after the spike", step)
        return state
