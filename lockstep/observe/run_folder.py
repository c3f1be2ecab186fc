"""The folder a run writes, and who may write into it."""

from __future__ import annotations

import json
import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.observe.logs import log
from lockstep.observe.watchdog import VERDICT

CONFIG, METRICS = "config.toml", "metrics.jsonl"


@dataclass(frozen=True)
class RunFolder:
    """Paths within a run's folder."""

    path: Path

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    def rollouts_path(self, step: int) -> Path:
        return self.path / "rollouts" / f"step_{step:08}.jsonl"

    def validation_path(self, step: int) -> Path:
        return self.path / "rollouts" / f"validation_{step:08}.jsonl"

    def truncate(self, step: int) -> None:
        """Forgets metrics and rollouts after `step`, which a resumed run writes anew."""
        if self.metrics.is_file():
            kept = [line for line in self.metrics.read_text().splitlines() if _step_of(line) <= step]
            partial = self.metrics.with_name(METRICS + ".partial")
            partial.write_text("".join(line + "\n" for line in kept))
            partial.replace(self.metrics)
        for kind in ("step", "validation"):
            for path in self.path.glob(f"rollouts/{kind}_*.jsonl"):
                if path.name > f"{kind}_{step:08}.jsonl":
                    path.unlink()


def open_run(output: str, config_toml: str, resume: bool = False, overwrite: bool = False) -> RunFolder:
    """Creates the run's folder, or opens it again.

    Raises UserError where `output` already holds a run (without `resume` or `overwrite`) or holds something else. A
    folder without a run may be given to `resume`: whoever restarts a run need not know how far it came.
    """
    run = RunFolder(Path(output))
    holds_run = (run.path / CONFIG).is_file()
    if run.path.exists() and not run.path.is_dir():
        raise UserError(f"{output}: is a file; give another --output")
    if holds_run and not (resume or overwrite):
        raise UserError(f"{output}: already holds a run; continue it with --resume, or replace it with --overwrite")
    if run.path.is_dir() and any(p.suffix != ".partial" for p in run.path.iterdir()) and not holds_run:
        raise UserError(f"{output}: is not empty and holds no run; give another --output")
    if holds_run and overwrite:
        shutil.rmtree(run.path)
    run.path.mkdir(parents=True, exist_ok=True)
    (run.path / "logs" / VERDICT).unlink(missing_ok=True)
    if resume and holds_run and not overwrite:
        if changed := _changed_settings(run.path / CONFIG, config_toml):
            log.warning("%s goes on with other settings than it began with: %s", output, "; ".join(changed))
    else:
        # First and at once: a folder whose run was killed here is that run's, or still empty.
        partial = run.path / (CONFIG + ".partial")
        partial.write_text(config_toml)
        partial.replace(run.path / CONFIG)
    (run.path / "checkpoints").mkdir(exist_ok=True)
    return run


def _changed_settings(config: Path, config_toml: str) -> list[str]:
    try:
        before, now = (_flat(tomllib.loads(text)) for text in (config.read_text(), config_toml))
    except ValueError:
        return [f"those in {config} cannot be read"]
    names = [n for n in now if n not in ("output", "resume", "overwrite") and now[n] != before.get(n, now[n])]
    return [f"{name} {now[name]!r}, was {before[name]!r}" for name in names]


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings of a TOML file by their names on the command line."""
    values: dict[str, Any] = {}
    for key, value in table.items():
        values |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return values


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a line that was cut off when the run was
