"""A run's checkpoints: when it is saved, which are kept, and where it resumes."""

from __future__ import annotations

import fnmatch
import json
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist

from lockstep.checkpoint.folders import (
    ADAPTERS,
    STATE,
    adapters_of,
    checkpoints_in,
    link_latest,
    note_adapter,
    step_name,
    weights_folder,
)
from lockstep.checkpoint.manifest import Piece, damage, listed_files, sync_folder, write_manifest
from lockstep.checkpoint.part import Part
from lockstep.checkpoint.staging import Staging, in_place
from lockstep.checkpoint.storage import StoredTensors, save_parts
from lockstep.checkpoint.training_state import STEMS, parts_to_load, take_over, tensors_to_save
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
from lockstep.model.adapter_base import digest, refuse_other_base
from lockstep.model.adapter_folder import refuse_other_adapter
from lockstep.observe.logs import log
from lockstep.parallel.world import World

Result = TypeVar("Result")


@runtime_checkable
class Training(Protocol):
    """What is saved: a trainer."""

    model: TrainableModel
    optimizer: Any
    world: World

    def counts(self) -> dict[str, Any]: ...
    def load_counts(self, counts: Mapping[str, Any]) -> None: ...


class _Copied(NamedTuple):
    """A run as it was after `step`, in the staging buffers."""

    step: int
    parts: dict[str, Part]
    counts: dict[str, Any]


class Checkpoints:
    """Saves a run to `RUN/checkpoints/step_…` and resumes it. All ranks call its methods. A context manager.

    A checkpoint with its final name is complete: it is written under another name, with a manifest of sizes and
    checksums, synced to disk and renamed. Leaving the context waits for the last one; raises UserError if it failed.
    """

    def __init__(self, run: Path, trainer: Training, tokenizer: Tokenizer, config: PretrainConfig | RLConfig):
        self.folder = run / "checkpoints"
        self.trainer, self.tokenizer, self.config = trainer, tokenizer, config
        self.world = trainer.world
        # A separate group: background messages must not mix with those of a step.
        self._group = dist.new_group(backend="gloo") if self.world.mesh is not None else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._staging = Staging()
        self._copied: _Copied | None = None
        self._running: Future[str] | None = None
        self._needed: set[Path] = set()
        """Superseded checkpoints that are kept for adapters, as a warning has said."""
        if self.world.is_main and trainer.model.config.lora is not None:
            note_adapter(self._base, run)
        self.newest: int | None = None
        """The step of the newest complete checkpoint that was saved or resumed from here."""

    def due(self, step: int) -> bool:
        """Whether to save: every `checkpoint.every` steps, and at the last one."""
        every = self.config.checkpoint.every
        return step == self.config.steps or (every > 0 and step % every == 0)

    def save(self, step: int, state: dict[str, Any], last: bool = False) -> None:
        """Saves the trainer and `state` (JSON, equal on all ranks) as of `step`, the run's `last` or not.

        If the trainer's state after `step` has been copied (`holds`), saves the copy: training may have gone on since.
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
        if in_background:
            copied = self._copy(step)
        else:
            self._copied = None
            self._staging.release()
            tensors = tensors_to_save(trainer.model, trainer.optimizer, dtype, self.world.rank, model_only)
            copied = _Copied(step, in_place(tensors), trainer.counts())
        state = {**state, **copied.counts, "step": step, "model_only": model_only}
        state["arithmetic"] = arithmetic_of(self.world.device)
        self._running = self._thread.submit(self._write, step, copied.parts, dtype, state)
        if not in_background:
            self.wait()

    def keep(self, step: int) -> None:
        """Copies the trainer's state, that after `step`, so that it can be saved once training has gone on.

        Not if it is copied or saved already, or without `checkpoint.asynchronous`, which has the memory for it.
        """
        if self.config.checkpoint.asynchronous and not self.holds(step):
            self.wait()
            self._copy(step)

    def holds(self, step: int) -> bool:
        """Whether the state after `step` is saved or can be, however far training has gone on; equal on all ranks."""
        return step == self.newest or (self._copied is not None and step == self._copied.step)

    def _copy(self, step: int) -> _Copied:
        if self._copied is None or self._copied.step != step:
            self._copied = None  # what it has is about to be overwritten
            trainer, dtype = self.trainer, resolve_dtype(self.config.dtype)
            tensors = tensors_to_save(trainer.model, trainer.optimizer, dtype, self.world.rank)
            self._copied = _Copied(step, self._staging.copy(tensors), trainer.counts())
        return self._copied

    def wait(self) -> str:
        """Waits until no save is running. Returns why the last one failed, empty if it did not."""
        return self._running.result() if self._running is not None else ""

    def resume(self, restore: Callable[[dict[str, Any]], None] = lambda state: None) -> dict[str, Any] | None:
        """Restores trainer and random generators from the newest complete checkpoint; returns what `save` was given.

        `restore` is called with it first, and restores the caller's part of it; if that fails on a state of
        another shape, the checkpoint counts as unreadable. None if there is no checkpoint. An unreadable one is named
        in a warning, and the next older one is tried. For a finished run with only the model, no tensors are loaded.
        Raises UserError for a checkpoint of another model, and if there are checkpoints but none to resume from; a
        UserError from `restore` is passed on.
        """
        self.wait()
        self._copied = self.newest = None
        if self.world.is_main:
            for left_over in self.folder.glob("*.partial"):
                _delete(left_over)
        problem, overwritten = "", False
        # Ranks may see different folders if a file system is slow to show them: rank 0 decides which there are.
        for name in self.world.from_main(lambda: [p.name for p in checkpoints_in(self.folder)]):
            folder = self.folder / name
            state, problem = self._verified(folder)
            if not problem and state["model_only"] and not self._has_ended(state):
                problem = "it contains only the model (checkpoint.last_model_only)"
            if not problem:
                problem = self._restore(state, restore)
            if not problem and not state["model_only"]:
                overwritten = True
                problem = self._load(folder)
            if not problem:
                self._name_other_bits(folder, state.get("arithmetic", ""))
                self.newest = state["step"]
                return state
            if self.world.is_main:
                log.warning("%s cannot be resumed from: %s; trying an older one", folder, problem)
        if problem:
            message = (
                f"{self.folder}: the run cannot resume from any checkpoint in it, the oldest because {problem}; start "
                "over with --overwrite, or from a checkpoint's weights with --model FOLDER and another --output"
            )
            # Weights that are partly another checkpoint's must not be trained on, even if someone catches a UserError.
            raise RunStopped(message, exit_code=1) if overwritten else UserError(message)
        return None

    def _has_ended(self, state: dict[str, Any]) -> bool:
        """Whether this start's settings leave nothing to train after `state`."""
        repeat = isinstance(self.config, PretrainConfig) and self.config.loader.repeat
        return state["step"] >= self.config.steps or (state.get("data_ended", False) and not repeat)

    def _name_other_bits(self, folder: Path, arithmetic: str) -> None:
        if not self.world.is_main:
            return
        chunks, now = self.trainer.model.config.reduction_chunks, arithmetic_of(self.world.device)
        changes = {} if arithmetic in ("", now) else {f"in {arithmetic} arithmetic": f"in {now}"}
        if (before := read_config(folder).reduction_chunks) != chunks:
            changes[f"with reduction_chunks {before}"] = f"with {chunks}"
        if changes:
            log.warning(
                "%s was computed %s, but the run resumes %s: results from here on are as good, but not bit for bit "
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
                # The writer creates it again, within the ranks' common plan: what fails there fails on all of them.
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
        """On the main rank, when all tensors are written."""
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
        # The run could not be resumed from later ones: they must not push out those from which it can.
        newest_first = [p for p in checkpoints_in(self.folder) if p <= folder]
        for old in _superseded(newest_first, self.config.checkpoint):
            if not (needed := adapters_of(old)):
                _delete(old)
            elif old not in self._needed:
                self._needed.add(old)
                log.warning(
                    "%s is kept, because it is the base of the adapter in %s; delete %s in it to let go of it",
                    old,
                    ", ".join(needed),
                    ADAPTERS,
                )

    def _verified(self, folder: Path) -> tuple[dict[str, Any], str]:
        """A checkpoint's state, and what is wrong with it; the same on all ranks."""
        problem = self._first(damage(folder, rank=self.world.rank, ranks=self.world.size))
        if problem:
            return {}, problem
        state, problem = self.world.from_main(lambda: _read_state(folder))
        return state, problem

    def _restore(self, state: dict[str, Any], restore: Callable[[dict[str, Any]], None]) -> str:
        """Restores what is in a checkpoint's state; returns why a rank could not, the same on all ranks."""

        def take_over() -> None:
            self.trainer.load_counts(state)
            restore(state)

        return self._on_all(take_over)[1]

    def _load(self, folder: Path) -> str:
        """Fills model, optimizer and random generators; returns why a rank could not, the same on all ranks."""
        trainer = self.trainer
        prepared, problem = self._on_all(lambda: self._to_load(folder))
        if not prepared or problem:
            return problem
        held, (parts, state, random) = prepared

        def read() -> None:
            held.fill(parts)
            take_over(trainer.optimizer, state, random)

        return self._on_all(read)[1]

    @property
    def _base(self) -> Path:
        """The base of the run's adapter."""
        return base_folder(weights_folder(local_folder(self.config.model)))

    @cached_property
    def _base_digest(self) -> str:
        """Computed once: the run does not change its base."""
        return digest(self._base)

    def _to_load(self, folder: Path) -> tuple[StoredTensors, Any]:
        if is_adapter_folder(folder) and (lora := self.trainer.model.config.lora) is not None:
            refuse_other_base(folder, self._base)
            refuse_other_adapter(folder, lora)
        # Only what the manifest lists, and so was verified.
        listed = listed_files(folder)
        groups = {g: fnmatch.filter(listed, f"{stem}*.safetensors") for g, stem in STEMS.items()}
        held = StoredTensors({folder / name: group for group, names in groups.items() for name in names})
        return held, parts_to_load(folder, held, self.trainer.model, self.trainer.optimizer, self.world.rank)

    def _on_all(self, action: Callable[[], Result]) -> tuple[Result | None, str]:
        """Every rank does it. Returns its result, and why a rank could not, the same on all of them.

        Raises UserError on all ranks if one of them did.
        """
        result, refused, problem = None, "", ""
        try:
            result = action()
        except UserError as error:
            refused = str(error)
        except Exception as error:  # whatever a reader fails on, what it reads is not one of our checkpoints
            problem = f"it cannot be read ({type(error).__name__}: {error})"
        if refused := self._first(refused):
            raise UserError(refused)
        return result, self._first(problem)

    def _first(self, problem: str) -> str:
        """The problem of the first rank that has one, on every rank."""
        return next(filter(None, self.world.gather(problem)), "")


def _read_state(folder: Path) -> tuple[dict[str, Any], str]:
    """What a checkpoint's `save` was given, and what is wrong with it."""
    try:
        if STATE not in listed_files(folder):
            return {}, f"{STATE} is not in its list of files"
        state: dict[str, Any] = json.loads((folder / STATE).read_bytes())
        if step_name(state["step"]) != folder.name or not isinstance(state["model_only"], bool):
            return {}, f"{STATE} is from step {state['step']}, which does not match the folder's name"
        return state, ""
    except Exception as error:  # whatever a reader fails on, what it reads is not one of our checkpoints
        return {}, f"{STATE} cannot be read ({type(error).__name__}: {error})"


def _superseded(newest_first: list[Path], settings: Any) -> list[Path]:
    if settings.keep_last == 0:
        return []
    every = settings.keep_every
    kept = [p for p in newest_first if every > 0 and int(p.name.removeprefix("step_")) % every == 0]
    return [p for p in newest_first[settings.keep_last :] if p not in kept]


def _delete(folder: Path) -> None:
    """Renames it first: a half-deleted folder must not have a checkpoint's name."""
    if folder.suffix != ".partial" and folder.exists():
        hidden = folder.with_name(folder.name + ".deleted.partial")
        shutil.rmtree(hidden, ignore_errors=True)
        folder = folder.rename(hidden)
    shutil.rmtree(folder, ignore_errors=True)
