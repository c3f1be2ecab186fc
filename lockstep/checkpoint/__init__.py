"""Saving and resuming a whole run."""

from lockstep.checkpoint.store import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
