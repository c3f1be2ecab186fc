"""Saving and resuming a whole run.

`Checkpoints` itself is in `lockstep.checkpoint.checkpoints`: commands that only read a model do not need its imports.
"""

from lockstep.checkpoint.folders import checkpoints_in, newest_checkpoint, step_name, weights_folder
from lockstep.checkpoint.open_model import (
    folder_if_model,
    load_model,
    model_folder,
    name_other_chunks,
    open_model,
    trained_arithmetic,
)

__all__ = [
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
