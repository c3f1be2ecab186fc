"""A run's checkpoints: when to save, which to keep, and which to resume from."""

from __future__ import annotations

import fnmatch
import json
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import torch
import torch.distributed as dist

from lockstep.checkpoint.folders import (
    ADAPTERS,
    STATE,
    adapters_that_need,
    checkpoints_in,
    link_latest,
    record_adapter,
    step_name,
    weights_folder,
)
from lockstep.checkpoint.manifest import IncompleteCheckpoint, Piece, damage, listed_files, sync_folder, write_manifest
from lockstep.checkpoint.part import Part, Staging, in_place
from lockstep.checkpoint.storage import StoredTensors, save_parts
from lockstep.checkpoint.training_state import STEMS, load_training_state, parts_to_load, tensors_to_save
from lockstep.config import CONFIG, PretrainConfig, RLConfig, to_toml
from lockstep.data import Tokenizer
from lockstep.errors import RunStopped, UserError
from lockstep.hub import local_folder
from lockstep.model import (
    TrainableModel,
    arithmetic_of,
    base_folder,
    is_adapter_folder,
    read_config,
    resolve_dtype,
    write_adapter_description,
    write_description,
)
from lockstep.model.adapter_folder import refuse_other_adapter
from lockstep.model.folder import digest, refuse_other_base
from lockstep.observe.logs import log
from lockstep.parallel.world import World

Result = TypeVar("Result")


@runtime_checkable
class Training(Protocol):
    """The trainer whose state is saved."""

    model: TrainableModel
    optimizer: Any
    world: World

    def counts(self) -> dict[str, Any]: ...
    def load_counts(self, counts: Mapping[str, Any]) -> None: ...


class Checkpoints:
    """Saves a run to `RUN/checkpoints/step_…` and resumes it. All ranks call its methods. A context manager.

    A checkpoint is written under another name, with a manifest of sizes and checksums, synced to disk and then renamed,
    so one with its final name is complete. Leaving the context waits for the last save; raises UserError if it failed.
    """

    def __init__(self, run: Path, trainer: Training, tokenizer: Tokenizer, config: PretrainConfig | RLConfig):
        self.folder = run / "checkpoints"
        self.trainer, self.tokenizer, self.config = trainer, tokenizer, config
        self.world = trainer.world
        # A separate group, so that background messages do not mix with those of a step.
        self._group = dist.new_group(backend="gloo") if self.world.mesh is not None else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._staging = Staging()
        self._running: Future[str] | None = None
        self._needed: set[Path] = set()
        """Superseded checkpoints kept for adapters, each already named in a warning."""
        if self.world.is_main and trainer.model.config.lora is not None:
            record_adapter(self._base, run)
        self.newest: int | None = None
        """The step of the newest complete checkpoint that this object saved or resumed from."""

    def due(self, step: int) -> bool:
        """Whether to save after `step`: every `checkpoint.every` steps."""
        every = self.config.checkpoint.every
        return every > 0 and step % every == 0

    def save(self, step: int, state: dict[str, Any], last: bool = False) -> None:
        """Saves the trainer and `state` (JSON, equal on all ranks) as of `step`, the run's `last` or not.

        Waits for a save that is still running, then writes in the background if configured; the last save is waited
        for, without copying what is saved. If a save fails because of the disk, the run warns and continues.
        """
        self.wait()
        settings = self.config.checkpoint
        dtype = resolve_dtype((settings.last_dtype if last else "") or self.config.dtype)
        model_only = last and settings.last_model_only
        trainer = self.trainer
        # Nothing changes the tensors while this waits, or after the last step.
        in_background = settings.asynchronous and not last
        tensors = tensors_to_save(trainer.model, trainer.optimizer, dtype, self.world.rank, model_only)
        if in_background:
            parts = self._staging.copy(tensors)
        else:
            self._staging.release()
            parts = in_place(tensors)
        state = {**state, **trainer.counts(), "step": step, "model_only": model_only}
        state["arithmetic"] = arithmetic_of(self.world.device)
        self._running = self._thread.submit(self._write, step, parts, dtype, state)
        if not in_background:
            self.wait()

    def wait(self) -> str:
        """Waits for a running save. Returns why the last one failed; empty if it succeeded."""
        return self._running.result() if self._running is not None else ""

    def resume(self, restore: Callable[[dict[str, Any]], None] = lambda state: None) -> dict[str, Any] | None:
        """Restores trainer and random generators from the newest complete checkpoint; returns the saved state.

        First calls `restore` with that state, to restore the caller's part; if it fails, other than by a UserError,
        the checkpoint counts as unreadable. Unreadable checkpoints are skipped with a warning. Returns None if there is
        no checkpoint. For a finished run with only the model, no tensors are loaded. Raises UserError for a checkpoint
        of another model, if no checkpoint can be resumed from, and if `restore` does.
        """
        self.wait()
        self.newest = None
        if self.world.is_main:
            for unfinished in self.folder.glob("*.partial"):
                _delete(unfinished)
        problem, overwritten = "", False
        # Rank 0 lists the folders: ranks may see different ones if the file system is slow to show them.
        for name in self.world.from_main(lambda: [p.name for p in checkpoints_in(self.folder)]):
            folder = self.folder / name
            try:
                state = self._verified(folder)
                self._on_all(partial(self._restore, state, restore))
                if not state["model_only"]:
                    overwritten = True
                    self._load(folder)
                self._warn_about_other_arithmetic(folder, state.get("arithmetic", ""))
                self.newest = state["step"]
                return state
            except IncompleteCheckpoint as error:
                problem = str(error)
            if self.world.is_main:
                log.warning("%s cannot be resumed from: %s; trying an older one", folder, problem)
        if problem:
            message = (
                f"{self.folder}: the run cannot resume from any checkpoint in it, the oldest because {problem}; start "
                "over with --overwrite, or from a checkpoint's weights with --model FOLDER and another --output"
            )
            # A RunStopped, since a caller that catches UserErrors must not train on partly overwritten weights.
            raise RunStopped(message, exit_code=1) if overwritten else UserError(message)
        return None

    def _has_ended(self, state: dict[str, Any]) -> bool:
        """Whether the current settings leave nothing to train after `state`."""
        repeat = isinstance(self.config, PretrainConfig) and self.config.loader.repeat
        return state["step"] >= self.config.steps or (state.get("data_ended", False) and not repeat)

    def _warn_about_other_arithmetic(self, folder: Path, arithmetic: str) -> None:
        if not self.world.is_main:
            return
        chunks, now = self.trainer.model.config.reduction_chunks, arithmetic_of(self.world.device)
        changes = {} if arithmetic in ("", now) else {f"in {arithmetic} arithmetic": f"in {now}"}
        if (before := read_config(folder).reduction_chunks) != chunks:
            changes[f"with reduction_chunks {before}"] = f"with {chunks}"
        if changes:
            log.warning(
                "%s was computed %s, but the run resumes %s: further results are as good, but not bitwise identical to "
                "those of an uninterrupted run",
                folder,
                " and ".join(changes),
                " and ".join(changes.values()),
            )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._thread.shutdown()
        if error is None and (problem := self.wait()):
            raise UserError(
                f"the run's last checkpoint could not be written: {problem}; free some space, then --resume continues "
                "from the newest one that was written"
            )

    def _write(self, step: int, parts: dict[str, Part], dtype: torch.dtype, state: dict[str, Any]) -> str:
        folder = self.folder / step_name(step)
        incomplete = folder.with_name(folder.name + ".partial")
        try:
            if self.world.is_main:
                # Recreated in `save_parts`, where a failure on one rank fails all of them.
                _delete(incomplete)
            complete = partial(self._complete, folder, dtype=dtype, state=state)
            save_parts(parts, incomplete, STEMS, complete, self._group)
            self.newest = step
            return ""
        except OSError as error:
            problem = f"{folder.name}: {error}"
        if self.world.is_main:
            _delete(incomplete)
            log.error("CHECKPOINT NOT WRITTEN: %s. The run continues; earlier checkpoints are intact", problem)
        return problem

    def _complete(
        self, folder: Path, files: dict[str, str], pieces: list[Piece], dtype: torch.dtype, state: dict[str, Any]
    ) -> None:
        """Completes and renames the folder; called on the main rank once all tensors are written."""
        incomplete = folder.with_name(folder.name + ".partial")
        model_files = {n.removeprefix("model/"): f for n, f in files.items() if n.startswith("model/")}
        shape = self.trainer.model.config
        if shape.lora is None:
            write_description(incomplete, shape, dtype, model_files, shape.num_parameters * dtype.itemsize)
        else:
            write_adapter_description(incomplete, shape, self._base, self._base_digest)
        self.tokenizer.save(incomplete)
        (incomplete / STATE).write_text(json.dumps(state, indent=1))
        (incomplete / CONFIG).write_text(to_toml(self.config))
        write_manifest(incomplete, pieces)
        if folder.exists():
            _delete(folder)
        incomplete.rename(folder)
        sync_folder(folder.parent)
        link_latest(folder)
        # Later ones do not count: the run could not resume from them, so they must not displace older ones.
        newest_first = [p for p in checkpoints_in(self.folder) if p <= folder]
        for old in _superseded(newest_first, self.config.checkpoint):
            if not (needed := adapters_that_need(old)):
                _delete(old)
            elif old not in self._needed:
                self._needed.add(old)
                log.warning(
                    "%s is kept because it is the base of the adapter in %s; delete %s in it if it is no longer needed",
                    old,
                    ", ".join(needed),
                    ADAPTERS,
                )

    def _verified(self, folder: Path) -> dict[str, Any]:
        """A checkpoint's state. Raises IncompleteCheckpoint, on all ranks, if it cannot be resumed from."""

        def verify() -> None:
            if problem := damage(folder, rank=self.world.rank, ranks=self.world.size):
                raise IncompleteCheckpoint(problem)

        self._on_all(verify)
        state, problem = self.world.from_main(lambda: _read_state(folder))
        if not problem and state["model_only"] and not self._has_ended(state):
            problem = "it contains only the model (checkpoint.last_model_only)"
        if problem:
            raise IncompleteCheckpoint(problem)
        return dict(state)

    def _restore(self, state: dict[str, Any], restore: Callable[[dict[str, Any]], None]) -> None:
        self.trainer.load_counts(state)
        restore(state)

    def _load(self, folder: Path) -> None:
        """Loads model, optimizer and random generators."""
        stored, (parts, state, random) = self._on_all(lambda: self._to_load(folder))

        def read() -> None:
            stored.fill(parts)
            load_training_state(self.trainer.optimizer, state, random)

        self._on_all(read)

    @property
    def _base(self) -> Path:
        """The base of the run's adapter."""
        return base_folder(weights_folder(local_folder(self.config.model)))

    @cached_property
    def _base_digest(self) -> str:
        """Computed once, since a run does not change its base."""
        return digest(self._base)

    def _to_load(self, folder: Path) -> tuple[StoredTensors, Any]:
        if is_adapter_folder(folder) and (lora := self.trainer.model.config.lora) is not None:
            refuse_other_base(folder, self._base)
            refuse_other_adapter(folder, lora)
        # Only files that the manifest lists, which have been verified.
        listed = listed_files(folder)
        groups = {g: fnmatch.filter(listed, f"{stem}*.safetensors") for g, stem in STEMS.items()}
        stored = StoredTensors({folder / name: group for group, names in groups.items() for name in names})
        return stored, parts_to_load(folder, stored, self.trainer.model, self.trainer.optimizer, self.world.rank)

    def _on_all(self, action: Callable[[], Result]) -> Result:
        """Runs `action` on every rank; returns this rank's result.

        Raises, on all ranks, UserError if one does, and IncompleteCheckpoint if one fails otherwise: readers fail in
        many ways on what is not our checkpoint.
        """
        result, refused, problem = None, "", ""
        try:
            result = action()
        except UserError as error:
            refused = str(error)
        except IncompleteCheckpoint as error:
            problem = str(error)
        except Exception as error:
            problem = f"it cannot be read ({type(error).__name__}: {error})"
        all_refused, problems = zip(*self.world.gather([refused, problem]))
        if any(all_refused):
            raise UserError(next(filter(None, all_refused)))
        if any(problems):
            raise IncompleteCheckpoint(next(filter(None, problems)))
        return cast(Result, result)


def _read_state(folder: Path) -> tuple[dict[str, Any], str]:
    """The state passed to a checkpoint's `save`, and what is wrong with it, if anything."""
    try:
        if STATE not in listed_files(folder):
            return {}, f"{STATE} is not listed in its manifest"
        state: dict[str, Any] = json.loads((folder / STATE).read_bytes())
        if step_name(state["step"]) != folder.name or not isinstance(state["model_only"], bool):
            return {}, f"{STATE} is from step {state['step']}, which does not match the folder's name"
        return state, ""
    except Exception as error:  # readers fail in many ways on what is not our checkpoint
        return {}, f"{STATE} cannot be read ({type(error).__name__}: {error})"


def _superseded(newest_first: list[Path], settings: Any) -> list[Path]:
    if settings.keep_last == 0:
        return []
    every = settings.keep_every
    permanent = [p for p in newest_first if every > 0 and int(p.name.removeprefix("step_")) % every == 0]
    return [p for p in newest_first[settings.keep_last :] if p not in permanent]


def _delete(folder: Path) -> None:
    """Deletes a folder after renaming it: a half-deleted folder must not have a checkpoint's name."""
    if folder.suffix != ".partial" and folder.exists():
        hidden = folder.with_name(folder.name + ".deleted.partial")
        shutil.rmtree(hidden, ignore_errors=True)
        folder = folder.rename(hidden)
    shutil.rmtree(folder, ignore_errors=True)
