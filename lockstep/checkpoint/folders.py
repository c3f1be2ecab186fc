"""Finds a run's newest checkpoint and the folder of a model's files."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from lockstep.checkpoint.manifest import MANIFEST, damage
from lockstep.errors import UserError
from lockstep.observe.logs import log
from lockstep.observe.run_folder import ADAPTERS

STATE = "state.json"
LATEST = "latest"
"""In a run's folder: a link to its newest checkpoint, for other tools, which expect a model's folder."""


def step_name(step: int) -> str:
    """A checkpoint's folder name."""
    return f"step_{step:08}"


def checkpoints_in(folder: Path) -> list[Path]:
    """The folders with a checkpoint's name, newest first, complete or not."""
    folders = [p for p in folder.glob("step_*") if p.is_dir() and p.name.removeprefix("step_").isdigit()]
    return sorted(folders, reverse=True)


def newest_checkpoint(run: Path) -> Path | None:
    """A run's newest checkpoint that has all its files with their sizes; `Checkpoints.resume` verifies checksums.

    None if there are no checkpoints. Warns about newer ones that are incomplete. Raises UserError if all are.
    """
    problem = ""
    for folder in checkpoints_in(run / "checkpoints"):
        if not (damaged := damage(folder, checksums=False)):
            return folder
        log.warning("%s is not complete: %s; using an older one", folder, damaged)
        problem = problem or f"{folder.name}: {damaged}"
    if problem:
        raise UserError(f"{run}: has no complete checkpoint ({problem}); give another folder")
    return None


def weights_folder(folder: Path) -> Path:
    """The folder of a model's files: `folder` or, for a run's folder, its newest checkpoint.

    Raises UserError for a run without a complete checkpoint, and for a checkpoint whose model is incomplete.
    """
    if newest := newest_checkpoint(folder):
        return newest
    if (folder / "checkpoints").is_dir() and not (folder / "config.json").is_file():
        raise UserError(f"{folder}: is a run without a finished checkpoint yet; give a model's folder")
    if folder.suffix == ".partial":
        raise UserError(f"{folder}: is an unfinished checkpoint; give an older one")
    if (folder / STATE).is_file() or (folder / MANIFEST).is_file():
        # The folder may have been copied without the optimizer's files.
        patterns = ("*.json", "model*", "adapter_model*")
        problem = next(filter(None, (damage(folder, checksums=False, pattern=p) for p in patterns)), "")
        if problem:
            raise UserError(f"{folder}: is not a complete checkpoint: {problem}; give an older one")
    return folder


def link_latest(checkpoint: Path) -> None:
    """Points the run's `latest` to `checkpoint`, where the file system supports links."""
    run, link = checkpoint.parent.parent, Path(checkpoint.parent.name, checkpoint.name)
    unfinished = run / f"{LATEST}.partial"
    with suppress(OSError):
        unfinished.unlink(missing_ok=True)
        unfinished.symlink_to(link, target_is_directory=True)
        os.replace(unfinished, run / LATEST)


def record_adapter(base: Path, run: Path) -> None:
    """Records in a checkpoint that the adapter of `run` needs it, so that the base's run does not delete it."""
    if (base / STATE).is_file():
        with suppress(OSError):  # it may belong to another user
            (base / ADAPTERS).write_text(json.dumps(sorted({*adapters_that_need(base), str(run.resolve())})))


def adapters_that_need(base: Path) -> list[str]:
    """The runs whose adapters need a checkpoint, as recorded; they may have been moved since."""
    try:
        runs = json.loads((base / ADAPTERS).read_text())
    except (OSError, ValueError):
        return []
    return [run for run in runs if isinstance(run, str)] if isinstance(runs, list) else []
