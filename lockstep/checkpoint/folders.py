"""Which of a run's checkpoints is the newest, and where a model's files are."""

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
"""In a run's folder: a link to its newest checkpoint, for other tools, which look for a model's files in a folder."""


def step_name(step: int) -> str:
    """A checkpoint's folder name."""
    return f"step_{step:08}"


def checkpoints_in(folder: Path) -> list[Path]:
    """The folders with a checkpoint's name, newest first, complete or not."""
    found = [p for p in folder.glob("step_*") if p.is_dir() and p.name.removeprefix("step_").isdigit()]
    return sorted(found, reverse=True)


def newest_checkpoint(run: Path) -> Path | None:
    """A run's newest checkpoint whose files are all there with their sizes; `Checkpoints.resume` verifies checksums.

    None if there are no checkpoints. A warning names newer ones that are incomplete. Raises UserError if all are.
    """
    problem = ""
    for folder in checkpoints_in(run / "checkpoints"):
        if not (found := damage(folder, checksums=False)):
            return folder
        log.warning("%s is not complete: %s; using an older one", folder, found)
        problem = problem or f"{folder.name}: {found}"
    if problem:
        raise UserError(f"{run}: has no complete checkpoint ({problem}); give another folder")
    return None


def weights_folder(folder: Path) -> Path:
    """Where a model's files are: in `folder` itself or, if it is a run's, in its newest checkpoint.

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
    """Points the run's `latest` to `checkpoint`; on file systems without links there is none."""
    run, link = checkpoint.parent.parent, Path(checkpoint.parent.name, checkpoint.name)
    unfinished = run / f"{LATEST}.partial"
    with suppress(OSError):
        unfinished.unlink(missing_ok=True)
        unfinished.symlink_to(link, target_is_directory=True)
        os.replace(unfinished, run / LATEST)


def note_adapter(base: Path, run: Path) -> None:
    """Writes into a checkpoint that the adapter of `run` needs it: the base's own run then keeps it."""
    if (base / STATE).is_file():
        with suppress(OSError):  # it may be somebody else's
            (base / ADAPTERS).write_text(json.dumps(sorted({*adapters_of(base), str(run.resolve())})))


def adapters_of(base: Path) -> list[str]:
    """The runs whose adapters need a checkpoint, where they were; they may have been moved since."""
    try:
        runs = json.loads((base / ADAPTERS).read_text())
    except (OSError, ValueError):
        return []
    return [run for run in runs if isinstance(run, str)] if isinstance(runs, list) else []
