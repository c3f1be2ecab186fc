"""Where metrics go beside `metrics.jsonl`: TensorBoard, Weights & Biases, trackio. Each imported where it is used."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lockstep.config import ObserveConfig
from lockstep.errors import UserError
from lockstep.observe.logs import log

PATIENCE = 3
"""Failures in a row, after which a sink is not written to any more."""
LEFT_OUT = "observe.%s could not be %s (%s), and the run goes on without it; metrics.jsonl in %s is whole"


@runtime_checkable
class Sink(Protocol):
    """Takes a step's metrics; values are finite or not."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def require_sinks(config: ObserveConfig) -> None:
    """Raises UserError where a chosen sink's package is not installed."""
    for name in _chosen(config):
        if find_spec(name) is None:
            raise UserError(f"observe.{name} is set, but {name} is not installed; pip install {name}, or leave it out")


def open_sinks(config: ObserveConfig, folder: Path) -> list[Sink]:
    """The chosen sinks, for the run in `folder`; a resumed run goes on in the same curves.

    One that cannot be reached is named in a warning and left out: `metrics.jsonl` has everything.
    """
    require_sinks(config)
    kinds: dict[str, Callable[[ObserveConfig, Path], Sink]] = {
        "tensorboard": TensorBoard,
        "wandb": WeightsAndBiases,
        "trackio": Trackio,
    }
    opened: list[Sink] = []
    for name in _chosen(config):
        try:
            opened.append(Guarded(name, kinds[name](config, folder)))
        except Exception as error:  # whatever a tracker raises, the run does not depend on it
            log.warning(LEFT_OUT, name, "opened", error, folder)
    return opened


class Guarded:
    """A sink whose failures are warnings; after `PATIENCE` in a row it is left alone, for each may take its time."""

    def __init__(self, name: str, sink: Sink):
        self._name, self._sink = name, sink
        self._failures = 0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._failures >= PATIENCE:
            return
        try:
            self._sink.write(step, metrics)
            self._failures = 0
        except Exception as error:
            self._failures += 1
            if self._failures == PATIENCE:
                log.warning(LEFT_OUT, self._name, f"written to at step {step}", error, "the run's folder")

    def close(self) -> None:
        try:
            self._sink.close()
        except Exception as error:
            log.warning("observe.%s could not be closed (%s); what it shows may end early", self._name, error)


class TensorBoard:
    """Event files in `tensorboard/`."""

    def __init__(self, config: ObserveConfig, folder: Path):
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, whose files are in `wandb/`."""

    def __init__(self, config: ObserveConfig, folder: Path):
        import wandb

        self._run: Any = wandb.init(
            project=config.project,
            name=folder.resolve().name,
            dir=str(folder),
            id=_run_id(folder),
            resume="allow",
            config={"folder": str(folder.resolve())},
        )
        self._run.save(str(folder / "config.toml"), base_path=str(folder), policy="now")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of trackio, in its own data base on this machine."""

    def __init__(self, config: ObserveConfig, folder: Path):
        import trackio

        self._run: Any = trackio.init(project=config.project, name=folder.resolve().name, resume="allow")
        self._finish = trackio.finish

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._finish()


def _chosen(config: ObserveConfig) -> list[str]:
    return [name for name in ("tensorboard", "wandb", "trackio") if getattr(config, name)]


def _run_id(folder: Path) -> str:
    """Drawn once and kept in the folder: what a resumed run is known by."""
    path = folder / "wandb_id"
    if not path.is_file():
        path.write_text(secrets.token_hex(4))
    return path.read_text()
