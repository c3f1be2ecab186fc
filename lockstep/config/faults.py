"""What a run does when something goes wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from lockstep.config.bounds import Above, AtLeast


@dataclass
class FaultConfig:
    """Bad numbers, signals, and ranks that stop."""

    max_skipped_steps: Annotated[int, AtLeast(0)] = 5
    """Steps in a row that may be skipped because loss or gradient is not finite; the run ends at the next one."""
    spike_deviations: Annotated[float, AtLeast(0)] = 0.0
    """A loss so many standard deviations above the median of the last 100 steps is a spike; 0: none is."""
    on_spike: Literal["warn", "rollback"] = "warn"
    """`rollback` goes back to the newest checkpoint and on with the data after the spike."""
    stop_seconds: Annotated[float, Above(0)] = 25.0
    """From SIGTERM or SIGINT to the end, saving included. torchrun kills what has not ended after 30."""
    watchdog_seconds: Annotated[float, AtLeast(0)] = 480.0
    """A rank without progress for so long ends the run, after naming who holds it up, step and phase; 0: no limit."""
