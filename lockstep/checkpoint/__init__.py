"""Saving and resuming a whole run."""

from lockstep.checkpoint.checkpoints import Checkpoints, checkpoints_in, newest_checkpoint, step_name

__all__ = ["Checkpoints", "checkpoints_in", "newest_checkpoint", "step_name"]
