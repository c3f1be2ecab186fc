"""Metrics: one JSON object per step."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from lockstep.config import ObserveConfig
from lockstep.errors import RunStopped, UserError
from lockstep.observe.run_folder import RunFolder
from lockstep.observe.sinks import open_sinks
from lockstep.observe.tables import Table

TOKENS, TOTAL_TOKENS = "tokens", "tokens/total"
"""Metrics: the tokens that a step trained on, and those of all steps so far."""


class MetricsWriter:
    """Appends to `metrics.jsonl` and to the sinks that `config` enables. A context manager."""

    def __init__(self, folder: Path, config: ObserveConfig | None = None):
        self._run = RunFolder(folder)
        self._sinks = open_sinks(config, folder) if config is not None else []
        self._file = self._open()

    def _open(self) -> FileIO:
        # Unbuffered, so that the file is complete at any time, also after the run was killed.
        return FileIO(self._run.metrics, "a")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds `step` and `time` (Unix seconds). Values that are not finite are written as null: JSON has no NaN.

        Raises RunStopped if the line cannot be written to disk, without leaving part of it.
        """
        line = _line({"step": step, "time": time.time(), **metrics})
        size = os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(size)
            raise self._full(step, error) from error
        for sink in self._sinks:
            sink.write(step, metrics)

    def extend(self, last: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Adds metrics to `last`, the last line; the sinks get only the added ones.

        Raises RunStopped as `write` does.
        """
        lines = self._run.metrics.read_bytes().splitlines(keepends=True)
        changed = self._run.metrics.with_suffix(".partial")
        try:
            changed.write_bytes(b"".join(lines[:-1]) + _line({**last, **metrics}))
            changed.replace(self._run.metrics)
        except OSError as error:
            raise self._full(last["step"], error) from error
        self._file.close()
        self._file = self._open()
        for sink in self._sinks:
            sink.write(last["step"], metrics)

    def write_table(self, step: int, name: str, table: Table) -> None:
        """Writes a table of a step to the sinks only."""
        for sink in self._sinks:
            sink.write_table(step, name, table)

    def rewind(self, step: int) -> None:
        """Drops the lines after `step`, which the run writes again; the sinks keep both versions."""
        self._file.close()
        self._run.truncate(step)
        self._file = self._open()

    def _full(self, step: int, error: OSError) -> RunStopped:
        return RunStopped(
            f"{self._run.metrics}: the metrics of step {step} cannot be written ({error.strerror}), and the run "
            "ends here. Free some space, then --resume continues from the newest checkpoint",
            exit_code=1,
        )

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        for sink in self._sinks:
            sink.close()


def _line(values: Mapping[str, float | None]) -> bytes:
    finite = {name: value if value is not None and math.isfinite(value) else None for name, value in values.items()}
    return (json.dumps(finite) + "\n").encode()


def read_metrics(path: Path, skip_bad: bool = False) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`, without a last line that was cut off; a missing file counts as empty.

    Raises UserError, naming the line, for a damaged one; with `skip_bad` it is skipped.
    """
    if not path.is_file():
        return []
    lines = path.read_bytes().splitlines()
    metrics = []
    for index, line in enumerate(lines):
        try:
            values = json.loads(line.decode())
            if not _is_a_step(values):
                raise ValueError("a line needs a `step`, and numbers by name")
            metrics.append(values)
        except (ValueError, RecursionError) as error:
            if not skip_bad and index < len(lines) - 1:
                raise UserError(f"{path}:{index + 1}: not the metrics of a step ({error})") from error
    return metrics


def awaits_validation(lines: Sequence[Mapping[str, Any]], step: int) -> bool:
    """Whether the last line is that of `step`, without a validation."""
    return bool(lines) and lines[-1]["step"] == step and not any(n.startswith("validation/") for n in lines[-1])


def _is_a_step(values: Any) -> bool:
    if not isinstance(values, dict) or type(values.get("step")) is not int:
        return False
    numbers = [value for value in values.values() if value is not None]
    return all(type(value) is float or (type(value) is int and abs(value) < 2**63) for value in numbers)
