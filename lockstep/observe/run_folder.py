"""The folder a run writes, and who may write into it."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import UserError

CONFIG, METRICS = "config.toml", "metrics.jsonl"


@dataclass(frozen=True)
class RunFolder:
    """Paths within a run's folder."""

    path: Path

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    def rollouts_path(self, step: int) -> Path:
        return self.path / "rollouts" / f"step_{step:08}.jsonl"

    def checkpoint_path(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step_{step:08}"

    def newest_checkpoint(self) -> Path | None:
        """The newest whole checkpoint, if there is one."""
        found = sorted(p for p in self.path.glob("checkpoints/step_*") if p.suffix != ".partial")
        return found[-1] if found else None

    def truncate(self, step: int) -> None:
        """Forgets metrics and rollouts after `step`, which a resumed run writes anew."""
        if self.metrics.is_file():
            kept = [line for line in self.metrics.read_text().splitlines() if _step_of(line) <= step]
            partial = self.metrics.with_name(METRICS + ".partial")
            partial.write_text("".join(line + "\n" for line in kept))
            partial.replace(self.metrics)
        for path in self.path.glob("rollouts/step_*.jsonl"):
            if path > self.rollouts_path(step):
                path.unlink()


def open_run(output: str, config_toml: str, resume: bool = False, overwrite: bool = False) -> RunFolder:
    """Creates the run's folder, or opens it again.

    Raises UserError where `output` already holds a run (without `resume` or `overwrite`), holds something else, or
    is to be resumed and holds none.
    """
    run = RunFolder(Path(output))
    holds_run = (run.path / CONFIG).is_file()
    if run.path.exists() and not run.path.is_dir():
        raise UserError(f"{output}: is a file; give another --output")
    if resume and not holds_run:
        raise UserError(f"{output}: holds no run to resume; leave --resume out to start one")
    if holds_run and not (resume or overwrite):
        raise UserError(f"{output}: already holds a run; continue it with --resume, or replace it with --overwrite")
    if run.path.is_dir() and any(run.path.iterdir()) and not holds_run:
        raise UserError(f"{output}: is not empty and holds no run; give another --output")
    if holds_run and overwrite:
        shutil.rmtree(run.path)
    for folder in (run.path, run.path / "rollouts", run.path / "checkpoints"):
        folder.mkdir(parents=True, exist_ok=True)
    if not resume:
        (run.path / CONFIG).write_text(config_toml)
    return run


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a line that was cut off when the run was
