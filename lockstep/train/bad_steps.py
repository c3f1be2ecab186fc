"""Steps that were skipped because loss or gradient was not finite."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from lockstep.config import FaultConfig
from lockstep.data import Row, StepRows, Tokenizer
from lockstep.errors import RunStopped
from lockstep.observe import log
from lockstep.train.trainer import Trainer


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
