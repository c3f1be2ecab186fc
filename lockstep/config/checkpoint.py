"""When a run is saved, and which checkpoints are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from lockstep.config.bounds import AtLeast


@dataclass
class CheckpointConfig:
    """When a run is saved, and which checkpoints are kept."""

    every: Annotated[int, AtLeast(0)] = 0
    """Steps between checkpoints; 0: only by the clock, and the last."""
    every_minutes: Annotated[float, AtLeast(0)] = 15.0
    """Also save whenever this many minutes have passed since the last checkpoint or the start; 0: never."""
    keep_last: Annotated[int, AtLeast(0)] = 3
    """Newest checkpoints to keep; older ones are deleted once a newer one is complete. 0: keep all."""
    keep_every: Annotated[int, AtLeast(0)] = 0
    """Also keep every checkpoint whose step is a multiple of this; 0: none."""
    asynchronous: bool = True
    """Write in the background: a step waits only until its tensors are copied to host memory."""
    last_model_only: bool = False
    """Leave optimizer and random state out of the last checkpoint: smaller, but no run can resume from it."""
    last_dtype: Literal["", "bfloat16", "float32"] = ""
    """Dtype of the model's weights in the last checkpoint; empty: `dtype`."""
