"""Which of a run's checkpoints is the newest, and where a model's files are."""

from __future__ import annotations

from pathlib import Path

from lockstep.checkpoint.manifest import MANIFEST, damage
from lockstep.errors import UserError
from lockstep.observe.logs import log

STATE = "state.json"


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
