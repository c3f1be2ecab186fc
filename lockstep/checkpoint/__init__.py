"""Saves and resumes a whole run.

`Checkpoints` is in `lockstep.checkpoint.checkpoints`, because commands that only read a model do not need its imports.
"""

from lockstep.checkpoint.folders import checkpoints_in, newest_checkpoint, step_name, weights_folder
from lockstep.checkpoint.open_model import (
    folder_if_model,
    folder_of_ranks,
    load_model,
    model_folder,
    open_model,
    trained_arithmetic,
    warn_about_reduction_chunks,
)

__all__ = [
    "checkpoints_in",
    "folder_if_model",
    "folder_of_ranks",
    "load_model",
    "model_folder",
    "newest_checkpoint",
    "open_model",
    "step_name",
    "trained_arithmetic",
    "warn_about_reduction_chunks",
    "weights_folder",
]
