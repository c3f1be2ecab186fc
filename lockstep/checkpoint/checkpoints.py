"""A run's checkpoints: when it is saved, which are kept, and where it goes on."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from lockstep.checkpoint.manifest import Piece, damage, sync_folder, write_manifest
from lockstep.checkpoint.part import LoadPlanner, Part, SavePlanner
from lockstep.checkpoint.staging import Staging
from lockstep.checkpoint.storage import SafetensorsReader, SafetensorsWriter
from lockstep.checkpoint.training_state import STEMS, parts_to_load, take_over, tensors_to_save
from lockstep.config import PretrainConfig, RLConfig, to_toml
from lockstep.data import Tokenizer
from lockstep.errors import UserError
from lockstep.model import TrainableModel, arithmetic_of, resolve_dtype, write_description
from lockstep.observe.logs import log
from lockstep.parallel.world import World

STATE, CONFIG = "state.json", "config.toml"

# A world of one is meant, not an accident.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


@runtime_checkable
class Training(Protocol):
    """What is saved: a trainer."""

    model: TrainableModel
    optimizer: Any
    world: World

    def counts(self) -> dict[str, int]: ...
    def load_counts(self, counts: Mapping[str, Any]) -> None: ...


class Checkpoints:
    """Saves a run to `RUN/checkpoints/step_…` and resumes it. All ranks call its methods. A context manager.

    A checkpoint that has its name is whole: it is written under another name, with a manifest of sizes and checksums,
    synced to disk and renamed. Leaving the context waits for the last one, and raises UserError if it failed.
    """

    def __init__(self, run: Path, trainer: Training, tokenizer: Tokenizer, config: PretrainConfig | RLConfig):
        self.folder = run / "checkpoints"
        self.trainer, self.tokenizer, self.config = trainer, tokenizer, config
        self.world = trainer.world
        # A group of its own: the background's messages must not mix with those of a step.
        self._group = dist.new_group(backend="gloo") if self.world.mesh is not None else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._staging = Staging()
        self._running: Future[str] | None = None

    def due(self, step: int) -> bool:
        """Every `checkpoint.every` steps, and at the last one."""
        every = self.config.checkpoint.every
        return step == self.config.steps or (every > 0 and step % every == 0)

    def save(self, step: int, state: dict[str, Any], last: bool = False) -> None:
        """Saves the trainer and `state` (JSON, equal on all ranks) as of `step`, the run's `last` or not.

        Waits for a save that is still running, then writes in the background, where set. A save that fails for its
        disk warns, and the run goes on.
        """
        self.wait()
        settings = self.config.checkpoint
        dtype = resolve_dtype((settings.last_dtype if last else "") or self.config.dtype)
        model_only = last and settings.last_model_only
        trainer = self.trainer
        tensors = tensors_to_save(trainer.model, trainer.optimizer, dtype, self.world.rank, model_only)
        parts = self._staging.copy(tensors)
        state = {**state, **trainer.counts(), "step": step, "model_only": model_only}
        state["arithmetic"] = arithmetic_of(self.world.device)
        self._running = self._thread.submit(self._write, step, parts, dtype, state)
        if not settings.asynchronous:
            self.wait()
            self._staging.release()

    def wait(self) -> str:
        """Until no save is running. Returns why the last one failed, empty if it did not."""
        return self._running.result() if self._running is not None else ""

    def resume(self) -> dict[str, Any] | None:
        """Puts trainer and random generators back to the newest whole checkpoint; returns what `save` was given.

        None if there is no checkpoint. A damaged one is named in a warning, and the next older is tried. Of a run that
        has come to its end with the model only, nothing is loaded. Raises UserError for a checkpoint of another model,
        and where there are checkpoints, but none to go on from.
        """
        self.wait()
        if self.world.is_main:
            for left_over in self.folder.glob("*.partial"):
                _delete(left_over)
        problem = ""
        for folder in checkpoints_in(self.folder):
            problem = self._damage(folder)
            if not problem:
                state: dict[str, Any] = json.loads((folder / STATE).read_text())
                if not state["model_only"]:
                    self._load(folder)
                if not state["model_only"] or state["step"] >= self.config.steps or state.get("data_ended"):
                    self.trainer.load_counts(state)
                    self._name_other_arithmetic(folder, state.get("arithmetic", ""))
                    return state
                problem = "it holds the model only (checkpoint.last_model_only)"
            if self.world.is_main:
                log.warning("%s cannot be resumed from: %s; trying an older one", folder, problem)
        if problem:
            raise UserError(
                f"{self.folder}: the run cannot go on from any checkpoint in it, the oldest because {problem}; begin "
                "anew with --overwrite, or from a checkpoint's weights with --model FOLDER and another --output"
            )
        return None

    def _name_other_arithmetic(self, folder: Path, before: str) -> None:
        now = arithmetic_of(self.world.device)
        if self.world.is_main and before not in ("", now):
            log.warning(
                "%s was computed in %s arithmetic, and the run resumes in %s: results from here on are as good, but "
                "not bit for bit those of a run that was never interrupted",
                folder,
                before,
                now,
            )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._thread.shutdown()
        if error is None and (problem := self.wait()):
            raise UserError(
                f"the run's last checkpoint could not be written: {problem}; free some space, then --resume continues "
                "from the newest one that was"
            )

    def _write(self, step: int, parts: dict[str, Part], dtype: torch.dtype, state: dict[str, Any]) -> str:
        folder = self.folder / step_name(step)
        incomplete = folder.with_name(folder.name + ".partial")
        try:
            if self.world.is_main:
                # The writer makes it anew, within the ranks' common plan: what fails there fails on all of them.
                _delete(incomplete)
            writer = SafetensorsWriter(incomplete, STEMS, partial(self._complete, folder, dtype=dtype, state=state))
            dcp.save(
                parts,
                storage_writer=writer,
                planner=SavePlanner(),
                process_group=self._group,
                no_dist=self._group is None,
            )
            return ""
        except dcp.CheckpointException as error:
            failures = {rank: failure for rank, (failure, _) in error.failures.items()}
            if not all(isinstance(failure, OSError) for failure in failures.values()):
                raise
            problem = f"{folder.name}: " + "; ".join(f"rank {rank}: {failure}" for rank, failure in failures.items())
        except OSError as error:
            problem = f"{folder.name}: {error}"
        if self.world.is_main:
            _delete(incomplete)
            log.error("CHECKPOINT NOT WRITTEN: %s. The run goes on; earlier ones are whole", problem)
        return problem

    def _complete(
        self, folder: Path, files: dict[str, str], pieces: list[Piece], dtype: torch.dtype, state: dict[str, Any]
    ) -> None:
        """On the main rank, when all tensors are written."""
        incomplete = folder.with_name(folder.name + ".partial")
        model_files = {n.removeprefix("model/"): f for n, f in files.items() if n.startswith("model/")}
        shape = self.trainer.model.config
        write_description(incomplete, shape, dtype, model_files, shape.num_parameters * dtype.itemsize)
        self.tokenizer.save(incomplete)
        (incomplete / STATE).write_text(json.dumps(state, indent=1))
        (incomplete / CONFIG).write_text(to_toml(self.config))
        write_manifest(incomplete, pieces)
        if folder.exists():
            _delete(folder)
        incomplete.rename(folder)
        sync_folder(folder.parent)
        # Later ones are those that the run could not be resumed from: they must not push out what it can.
        newest_first = [p for p in checkpoints_in(self.folder) if p <= folder]
        for old in _superseded(newest_first, self.config.checkpoint):
            _delete(old)

    def _damage(self, folder: Path) -> str:
        found = damage(folder, rank=self.world.rank, ranks=self.world.size)
        if self._group is None:
            return found
        of_ranks: list[Any] = [""] * self.world.size
        dist.all_gather_object(of_ranks, found, group=self._group)
        return next(filter(None, of_ranks), "")

    def _load(self, folder: Path) -> None:
        reader = SafetensorsReader({f: g for g, stem in STEMS.items() for f in folder.glob(f"{stem}*.safetensors")})
        held = reader.read_metadata().state_dict_metadata
        trainer = self.trainer
        parts, state, random = parts_to_load(folder, held, trainer.model, trainer.optimizer, self.world.rank)
        dcp.load(
            parts,
            storage_reader=reader,
            planner=LoadPlanner(),
            process_group=self._group,
            no_dist=self._group is None,
        )
        take_over(trainer.optimizer, state, random)


def step_name(step: int) -> str:
    """A checkpoint's folder name."""
    return f"step_{step:08}"


def checkpoints_in(folder: Path) -> list[Path]:
    """The folders with a checkpoint's name, the newest first, whole or not."""
    found = [p for p in folder.glob("step_*") if p.is_dir() and p.name.removeprefix("step_").isdigit()]
    return sorted(found, reverse=True)


def newest_checkpoint(run: Path) -> Path | None:
    """A run's newest checkpoint with all its files at their sizes; checksums are left to `Checkpoints.resume`."""
    return next((p for p in checkpoints_in(run / "checkpoints") if not damage(p, checksums=False)), None)


def _superseded(newest_first: list[Path], settings: Any) -> list[Path]:
    if settings.keep_last == 0:
        return []
    every = settings.keep_every
    kept = [p for p in newest_first if every > 0 and int(p.name.removeprefix("step_")) % every == 0]
    return [p for p in newest_first[settings.keep_last :] if p not in kept]


def _delete(folder: Path) -> None:
    """Out of sight first: a folder that is half deleted must not have a checkpoint's name."""
    if folder.suffix != ".partial" and folder.exists():
        hidden = folder.with_name(folder.name + ".deleted.partial")
        shutil.rmtree(hidden, ignore_errors=True)
        folder = folder.rename(hidden)
    shutil.rmtree(folder, ignore_errors=True)
