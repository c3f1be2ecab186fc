"""Steps that are skipped because loss or gradient is not finite, and loss spikes."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median, pstdev
from typing import Any

from lockstep.checkpoint.checkpoints import Checkpoints
from lockstep.config import FaultConfig
from lockstep.data import Row, StepRows, Tokenizer
from lockstep.errors import RunStopped, UserError
from lockstep.observe import log
from lockstep.train.trainer import Trainer

WINDOW = 100
"""Steps that a loss is compared with."""
FEWEST = 20
"""Fewer losses than this are too few to compare a loss with."""
ROLLBACKS = 3
"""Rollbacks to the same checkpoint before the run ends."""


class BadSteps:
    """Saves the data of every skipped step, and ends the run after too many in a row."""

    def __init__(self, config: FaultConfig, run: Path, tokenizer: Tokenizer):
        self.config, self.tokenizer = config, tokenizer
        self.folder = run / "bad_batches"

    def check(self, step: int, trainer: Trainer, batch: StepRows | None = None) -> None:
        """Does nothing if `step` was not skipped. Raises RunStopped if too many were, after writing this rank's rows.

        The rows are written to `bad_batches/step_N_rank_R.jsonl`: tokens, the lengths of their sequences, and the text.
        """
        if not trainer.skipped_in_a_row:
            return
        rows = [] if batch is None else [row for rows in batch.microbatches for row in rows]
        self._write(step, trainer.world.rank, rows)
        message = f"step {step}: loss or gradient is not finite; the step was skipped"
        if rows:
            message += f"; its data is in {self.folder}"
        if trainer.skipped_in_a_row > self.config.max_skipped_steps:
            raise RunStopped(
                f"{message}. Skipped steps in a row: {trainer.skipped_in_a_row}; the run ends here. Check the data, "
                "lower train.learning_rate, or raise faults.max_skipped_steps; --resume goes back to the newest "
                "checkpoint",
                exit_code=1,
            )
        log.warning("%s (%d so far)", message, trainer.skipped_steps)

    def _write(self, step: int, rank: int, rows: Iterable[Row]) -> None:
        lines = []
        for row in rows:
            tokens = row.tokens.tolist()
            text = self.tokenizer.decode(tokens)
            lines.append(json.dumps({"tokens": tokens, "lengths": row.lengths, "text": text}, ensure_ascii=False))
        if lines:
            self.folder.mkdir(exist_ok=True)
            (self.folder / f"step_{step:08}_rank_{rank}.jsonl").write_text("\n".join(lines) + "\n")


class LossSpikes:
    """A `StepObserver` that detects spikes from the losses before them; the same on every rank, as all see the loss."""

    prefix = ""

    def __init__(self, config: FaultConfig):
        self.config = config
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._rollbacks: dict[int, int] = {}
        self._spike = False

    def state(self) -> list[float]:
        """The state for a checkpoint, so that a resumed run detects the same spikes; JSON-serializable."""
        return list(self._losses)

    def restore(self, state: Iterable[float] | None) -> None:
        """The inverse of `state`."""
        self._losses = deque(map(float, state or ()), maxlen=WINDOW)

    def observe(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Looks for a spike in the step's loss; adds no metrics."""
        self._spike = self.is_spike(step, metrics["loss"])
        return {}

    def ending(self) -> None:
        """No spike ends the run here; too many rollbacks do (`rewind`)."""

    def is_spike(self, step: int, loss: float) -> bool:
        """Whether `loss` is `spike_deviations` standard deviations above the median of recent losses, to which
        spikes do not count."""
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
