"""Saving and resuming a whole run."""

from lockstep.checkpoint.checkpoints import Checkpoints, checkpoints_in, newest_checkpoint, step_name
from lockstep.checkpoint.open_model import open_model, trained_arithmetic

__all__ = ["Checkpoints", "checkpoints_in", "newest_checkpoint", "open_model", "step_name", "trained_arithmetic"]
