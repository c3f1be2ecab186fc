"""Saving and resuming a whole run."""

from lockstep.checkpoint.checkpoints import Checkpoints, checkpoints_in, newest_checkpoint, step_name, weights_folder
from lockstep.checkpoint.open_model import (
    folder_if_model,
    load_model,
    model_folder,
    name_other_chunks,
    open_model,
    trained_arithmetic,
)

__all__ = [
    "Checkpoints",
    "checkpoints_in",
    "folder_if_model",
    "load_model",
    "model_folder",
    "name_other_chunks",
    "newest_checkpoint",
    "open_model",
    "step_name",
    "trained_arithmetic",
    "weights_folder",
]
