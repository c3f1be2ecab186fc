"""A run's folder, which one run at a time may write to."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from lockstep.config import CONFIG
from lockstep.errors import RunStopped, UserError
from lockstep.observe.heartbeat import remove_heartbeats
from lockstep.observe.logs import log
from lockstep.observe.run_lock import LOCK, locked
from lockstep.observe.start import announce
from lockstep.observe.watchdog import VERDICT

LAUNCH = "launch"
"""In the run's `logs/`: which torchrun started it."""
ADAPTERS = "adapters.json"
"""In a checkpoint: the runs that train an adapter for it, which need its weights."""
FUNCTIONS = "functions.json"
"""Names and digests of the user's functions in a reinforcement run."""
COPIES = ("loss.py", "advantage.py")
"""The files that these came from."""
METRICS, PROMPTS, LOADS = "metrics.jsonl", "prompts.jsonl", "expert_load.jsonl"
WRITTEN = {
    CONFIG, FUNCTIONS, *COPIES, METRICS, PROMPTS, LOADS, LOCK, "bad_batches", "checkpoints", "latest", "logs",
    "profile", "reference.safetensors", "report.html", "rollouts", "summary.json", "tensorboard", "timeline",
    "timeline.json", "wandb", "wandb_id",
}  # fmt: skip
"""Files and folders that runs write: nothing else in the folder is ever deleted."""
START_SETTINGS = ("output", "resume", "overwrite")
"""Settings for where and how a run starts, without effect on its results."""


@dataclass(frozen=True)
class RunFolder:
    """Paths within a run's folder."""

    path: Path

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    @property
    def prompts(self) -> Path:
        """For each step's prompts, by position in the run's order, whether they were trained on or why not."""
        return self.path / PROMPTS

    @property
    def expert_load(self) -> Path:
        """For a mixture of experts, how often each layer's experts were chosen in each step."""
        return self.path / LOADS

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def lacks_report(self) -> bool:
        """Whether the process was killed after writing a finished run's summary and before writing its report."""
        report = self.path / "report.html"
        return not report.is_file() or report.stat().st_mtime_ns < self.summary.stat().st_mtime_ns

    def write_summary(self, summary: dict[str, Any]) -> None:
        partial = self.path / "summary.json.partial"
        partial.write_text(json.dumps(summary, indent=1))
        partial.replace(self.summary)

    def rollouts_path(self, step: int) -> Path:
        return self.path / "rollouts" / f"step_{step:08}.jsonl"

    def validation_path(self, step: int) -> Path:
        return self.path / "rollouts" / f"validation_{step:08}.jsonl"

    def record(self, config_toml: str) -> None:
        """Replaces the recorded settings, atomically."""
        partial = self.path / (CONFIG + ".partial")
        with partial.open("w") as file:
            file.write(config_toml)
            file.flush()
            os.fsync(file.fileno())  # else it can be empty after a power failure, and the run resumes with defaults
        partial.replace(self.path / CONFIG)

    def truncate(self, step: int) -> None:
        """Drops metrics, prompts, expert loads and rollouts after `step`, which a resumed run writes again."""
        for file in (self.metrics, self.prompts, self.expert_load):
            if not file.is_file():
                continue
            lines = file.read_text(errors="replace").splitlines()
            steps = [_step_of(line) for line in lines]
            remaining = [line for line, of_line in zip(lines, steps) if of_line <= step]
            if broken := steps[:-1].count(inf):
                log.warning("%s: dropped %d damaged lines", file, broken)
            partial = file.with_name(file.name + ".partial")
            partial.write_text("".join(line + "\n" for line in remaining))
            partial.replace(file)
        for kind in ("step", "validation"):
            for path in self.path.glob(f"rollouts/{kind}_*.jsonl"):
                if path.name > f"{kind}_{step:08}.jsonl":
                    path.unlink()


def append_step(file: Path, step: int, values: Mapping[str, Any]) -> None:
    """Appends a step's line to one of the files that `truncate` truncates. Raises RunStopped if that fails."""
    try:
        with file.open("a") as opened:
            opened.write(json.dumps({"step": step, **values}) + "\n")
    except OSError as error:
        raise RunStopped(
            f"{file}: cannot be written ({error.strerror}), and the run ends here. Free some space, then --resume "
            "continues from the newest checkpoint",
            exit_code=1,
        ) from error


@contextmanager
def claim_run(output: str, config_toml: str, resume: bool = False, overwrite: bool = False) -> Iterator[RunFolder]:
    """`open_run`, with the folder locked within the context. Raises UserError if another run has locked it.

    A run that ends with an error before its first step is complete leaves no folder behind.
    """
    path = Path(output)
    existed, continued = path.exists(), _holds_run(path, resume, overwrite) and not overwrite
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); give another --output") from error
    failed = False
    try:
        with locked(path):
            try:
                yield open_run(output, config_toml, resume, overwrite)
            except BaseException:
                failed = not continued and not _has_results(path)
                if failed:
                    _empty(path)
                raise
    finally:
        if failed and not existed:
            with suppress(OSError):  # another run may have taken it
                path.rmdir()


def open_run(output: str, config_toml: str, resume: bool = False, overwrite: bool = False) -> RunFolder:
    """Creates or reopens the run's folder.

    Raises UserError if `output` already contains a run (without `resume` or `overwrite`) or something else. A folder
    without a run is accepted with `resume`, so that a run can be restarted before its first checkpoint. The new
    settings of a resumed run are written by `record`.
    """
    run = RunFolder(Path(output))
    holds_run = _holds_run(run.path, resume, overwrite)
    if holds_run and overwrite:
        _empty(run.path)
    run.path.mkdir(parents=True, exist_ok=True)
    (run.path / "logs" / VERDICT).unlink(missing_ok=True)
    remove_heartbeats(run.path)
    if resume and holds_run and not overwrite:
        if changed := _changed_settings(run.path / CONFIG, config_toml):
            log.warning("%s resumes with different settings: %s", output, "; ".join(changed))
    else:
        if resume:
            announce(f"{output} has no run to resume: this is its first start")
        # First, and atomically: if the run is killed here, the folder is empty or recognized as that run's.
        run.record(config_toml)
    (run.path / "checkpoints").mkdir(exist_ok=True)
    (run.path / "logs" / LAUNCH).unlink(missing_ok=True)
    if launch := _launch():
        (run.path / "logs").mkdir(exist_ok=True)
        (run.path / "logs" / LAUNCH).write_text(launch)
    return run


def is_restarted(output: str) -> bool:
    """Whether torchrun is restarting the run in `output` that it started before (`--max-restarts`).

    The environment alone does not distinguish this from an older run there, which the first start refused to replace.
    """
    path = Path(output)
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) == 0 or not _is_run(path):
        return False
    mark = path / "logs" / LAUNCH
    return mark.is_file() and mark.read_text() == _launch()


def _launch() -> str:
    """Identifies the torchrun that started this process; empty without one."""
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ:
        return ""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}: process {os.getppid()} on {socket.gethostname()}"


def _holds_run(path: Path, resume: bool, overwrite: bool) -> bool:
    """Whether there is a run to resume or overwrite. Raises UserError for a folder that must not be written to."""
    holds_run = _is_run(path)
    if path.exists() and not path.is_dir():
        raise UserError(f"{path}: is a file; give another --output")
    if holds_run and not (resume or overwrite):
        raise UserError(f"{path}: already contains a run; resume it with --resume, or replace it with --overwrite")
    entries = [p for p in path.iterdir() if p.suffix != ".partial" and p.name != LOCK] if path.is_dir() else []
    if entries and not holds_run:
        raise UserError(f"{path}: is not empty and is not a run's folder; give another --output")
    if overwrite and (others := sorted(p.name for p in entries if p.name not in WRITTEN)):
        named = ", ".join(others[:3]) + (", …" if others[3:] else "")
        raise UserError(f"{path}: contains files that no run wrote ({named}); move them, or give another --output")
    if overwrite and (needed := next(path.glob(f"checkpoints/*/{ADAPTERS}"), None)):
        raise UserError(
            f"{path}: {needed.parent.name} is the base of an adapter, which would lose it; give another --output, or "
            f"delete {needed}, which names the adapter's run"
        )
    return holds_run


def _is_run(path: Path) -> bool:
    """Whether the folder contains a run: a config.toml alone may be another program's."""
    config = path / CONFIG
    if not config.is_file():
        return False
    return (path / "checkpoints").is_dir() or "output = " in config.read_text(errors="replace")


def _has_results(path: Path) -> bool:
    """Whether a step was written, or logs that explain why there is none."""
    setup = (CONFIG, CONFIG + ".partial", FUNCTIONS, *COPIES, LOCK, LAUNCH)
    transient = ("timeline", "heartbeat_")
    files = [p for p in path.rglob("*") if p.is_file() and p.name not in setup and not p.name.startswith(transient)]
    return any(p.stat().st_size for p in files)


def _empty(path: Path) -> None:
    """Deletes the contents of a folder, except for the lock."""
    for entry in path.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != LOCK:
            entry.unlink()


def _changed_settings(config: Path, config_toml: str) -> list[str]:
    try:
        before, now = (flat_settings(tomllib.loads(text)) for text in (config.read_text(), config_toml))
    except (ValueError, RecursionError):
        return [f"the previous ones in {config} cannot be read"]
    names = [n for n in now if n not in START_SETTINGS and now[n] != before.get(n, now[n])]
    return [f"{name} {now[name]!r}, was {before[name]!r}" for name in names]


def flat_settings(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The settings of a TOML file by their command-line names."""
    values: dict[str, Any] = {}
    for key, value in table.items():
        values |= flat_settings(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return values


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return inf  # a line that was truncated when the run was killed
