"""One JSON object a step."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from lockstep.errors import UserError
from lockstep.observe.run_folder import METRICS


class MetricsWriter:
    """Appends to `metrics.jsonl` and, where asked, to TensorBoard. A context manager."""

    def __init__(self, folder: Path, tensorboard: bool = False):
        self._board = _tensorboard(folder) if tensorboard else None
        self._file = (folder / METRICS).open("a")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds `step` and `time` (Unix seconds). What is not finite is written as null, for JSON has no NaN."""
        line = {"step": step, "time": time.time(), **metrics}
        self._file.write(json.dumps({k: v if math.isfinite(v) else None for k, v in line.items()}) + "\n")
        # Flushed each step: whoever watches the run, or finds it killed, has all of it.
        self._file.flush()
        if self._board is not None:
            for name, value in metrics.items():
                self._board.add_scalar(name, value, step)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`; a last line that was cut off is left out, a missing file is empty."""
    if not path.is_file():
        return []
    lines = path.read_text().splitlines()
    metrics = []
    for index, line in enumerate(lines):
        try:
            metrics.append(json.loads(line))
        except ValueError as error:
            if index < len(lines) - 1:
                raise UserError(f"{path}:{index + 1}: not a JSON object ({error})") from error
    return metrics


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError("tensorboard is not installed; pip install tensorboard, or leave --tensorboard out") from error
    return SummaryWriter(str(folder / "tensorboard"))
