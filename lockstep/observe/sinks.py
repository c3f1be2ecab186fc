"""Where metrics go in addition to `metrics.jsonl`: TensorBoard, Weights & Biases, trackio, each imported on use."""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lockstep.config import CONFIG, ObserveConfig
from lockstep.errors import UserError
from lockstep.observe.logs import log
from lockstep.observe.tables import Table

PATIENCE = 3
"""Consecutive failures after which a sink is no longer written to."""
MAX_QUEUED = 1000
"""Maximum number of steps that are queued for a sink slower than the run."""
CLOSE_SECONDS = 10.0
"""Time limit for closing a sink: less than `faults.stop_seconds`, within which a run ends after a signal."""
LEFT_OUT = "observe.%s could not be %s (%s), and the run continues without it; metrics.jsonl in %s is complete"


@runtime_checkable
class Sink(Protocol):
    """Takes a step's metrics, whose values are finite or not, and its tables."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def write_table(self, step: int, name: str, table: Table) -> None: ...

    def close(self) -> None: ...


def require_sinks(config: ObserveConfig) -> None:
    """Raises UserError if a chosen sink's package is not installed."""
    for name in _chosen(config):
        if find_spec(name) is None:
            raise UserError(f"observe.{name} is set, but {name} is not installed; pip install {name}, or remove it")


def open_sinks(config: ObserveConfig, folder: Path) -> list[Sink]:
    """The chosen sinks, for the run in `folder`; a resumed run continues the same curves.

    A sink that cannot be reached is dropped with a warning: `metrics.jsonl` has everything. The run does not wait for
    sinks to open.
    """
    require_sinks(config)
    kinds: dict[str, Callable[[ObserveConfig, Path], Sink]] = {
        "tensorboard": TensorBoard,
        "wandb": _open_wandb,
        "trackio": _open_trackio,
    }
    return [BackgroundSink(name, partial(kinds[name], config, folder), folder) for name in _chosen(config)]


class BackgroundSink:
    """Runs a sink on a separate thread, so that it cannot block the run. Failures are logged as warnings.

    After `PATIENCE` consecutive failures the sink gets no more steps; if only tables fail, no more tables. Writes keep
    their order; while `MAX_QUEUED` are queued, further ones are dropped.
    """

    def __init__(self, name: str, open_sink: Callable[[], Sink], folder: Path):
        """open_sink: called on the sink's thread, since trackers keep their run in a context variable."""
        self._name, self._open, self._folder = name, open_sink, folder
        self._failures = self._failed_tables = 0
        self._left_out: set[int] = set()
        self._waiting: queue.SimpleQueue[tuple[int, dict[str, float] | tuple[str, Table]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"observe.{name}", daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Returns at once."""
        self._queue(step, dict(metrics))

    def write_table(self, step: int, name: str, table: Table) -> None:
        """Returns at once."""
        self._queue(step, (name, table))

    def _queue(self, step: int, written: dict[str, float] | tuple[str, Table]) -> None:
        if self._failures >= PATIENCE:
            return
        if self._waiting.qsize() < MAX_QUEUED:
            self._waiting.put((step, written))
            return
        if not self._left_out:
            log.warning(
                "observe.%s is %d steps behind at step %d, and drops steps until it catches up; metrics.jsonl in the "
                "run's folder is complete", self._name, MAX_QUEUED, step,
            )  # fmt: skip
        self._left_out.add(step)

    def close(self) -> None:
        """Waits until everything is written and the sink is closed, for at most `CLOSE_SECONDS`."""
        self._waiting.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            log.warning(
                "observe.%s did not finish within %g s and is abandoned; its last steps, or all of them, are missing",
                self._name,
                CLOSE_SECONDS,
            )
        if self._left_out:
            log.warning("observe.%s was too slow: %d steps are missing in it", self._name, len(self._left_out))

    def _work(self) -> None:
        try:
            sink = self._open()
        except (Exception, SystemExit) as error:  # no exception of a tracker ends the run
            self._failures = PATIENCE
            log.warning(LEFT_OUT, self._name, "opened", error, self._folder)
            return
        for step, written in iter(self._waiting.get, None):
            if self._failures < PATIENCE and isinstance(written, dict):
                self._write(sink, step, written)
            elif self._failures < PATIENCE and self._failed_tables < PATIENCE and isinstance(written, tuple):
                self._write_table(sink, step, *written)
        try:
            sink.close()
        except Exception as error:
            log.warning("observe.%s could not be closed (%s); its last steps may be missing", self._name, error)

    def _write(self, sink: Sink, step: int, metrics: Mapping[str, float]) -> None:
        try:
            sink.write(step, metrics)
            self._failures = 0
        except Exception as error:
            self._failures += 1
            if self._failures == PATIENCE:
                log.warning(LEFT_OUT, self._name, f"written to at step {step}", error, self._folder)

    def _write_table(self, sink: Sink, step: int, name: str, table: Table) -> None:
        try:
            sink.write_table(step, name, table)
            self._failed_tables = 0
        except Exception as error:
            self._failed_tables += 1
            if self._failed_tables == PATIENCE:
                log.warning(
                    "observe.%s failed to write the table %s at step %d (%s), and gets no more tables; rollouts/ in %s "
                    "has every completion", self._name, name, step, error, self._folder,
                )  # fmt: skip


class TensorBoard:
    """Event files in `tensorboard/`."""

    def __init__(self, config: ObserveConfig, folder: Path):
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def write_table(self, step: int, name: str, table: Table) -> None:
        self._writer.add_text(name, table.markdown(), step)

    def close(self) -> None:
        self._writer.close()


class Tracker:
    """A run of a package with the interface of Weights & Biases."""

    def __init__(self, package: Any, run: Any, finish: Callable[[], None]):
        self._table, self._run, self._finish = package.Table, run, finish

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def write_table(self, step: int, name: str, table: Table) -> None:
        rows = [list(row) for row in table.rows]
        self._run.log({name: self._table(columns=list(table.columns), data=rows)}, step=step)

    def close(self) -> None:
        self._finish()


def _open_wandb(config: ObserveConfig, folder: Path) -> Tracker:
    """A run of Weights & Biases, whose files are in `wandb/`."""
    import wandb

    run = wandb.init(
        project=config.project,
        name=folder.resolve().name,
        dir=str(folder),
        id=_run_id(folder),
        resume="allow",
        config={"folder": str(folder.resolve())},
    )
    run.save(str(folder / CONFIG), base_path=str(folder), policy="now")
    return Tracker(wandb, run, run.finish)


def _open_trackio(config: ObserveConfig, folder: Path) -> Tracker:
    """A run of trackio, in its own database on this machine."""
    import trackio

    run = trackio.init(project=config.project, name=folder.resolve().name, resume="allow")
    return Tracker(trackio, run, trackio.finish)


def _chosen(config: ObserveConfig) -> list[str]:
    return [name for name in ("tensorboard", "wandb", "trackio") if getattr(config, name)]


def _run_id(folder: Path) -> str:
    """Drawn once and stored in the folder, so that a resumed run continues the same one."""
    path = folder / "wandb_id"
    if not path.is_file():
        path.write_text(secrets.token_hex(4))
    return path.read_text()
