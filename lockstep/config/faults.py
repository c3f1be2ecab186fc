"""What a run does when something goes wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from lockstep.config.bounds import Above, AtLeast


@dataclass
class FaultConfig:
    """Non-finite numbers, signals, and ranks that hang."""

    max_skipped_steps: Annotated[int, AtLeast(0)] = 5
    """Consecutive steps that can be skipped because loss or gradient is not finite; the run ends at the next one."""
    spike_deviations: Annotated[float, AtLeast(0)] = 0.0
    """A loss this many standard deviations above the median of the last 100 steps is a spike; 0: off."""
    on_spike: Literal["warn", "rollback"] = "warn"
    """`rollback` goes back to the newest checkpoint and continues with the data after the spike."""
    stop_seconds: Annotated[float, Above(0)] = 25.0
    """Seconds from SIGTERM or SIGINT to the end, including saving. torchrun kills its ranks after 30."""
    watchdog_seconds: Annotated[float, AtLeast(0)] = 480.0
    """Seconds without progress on a rank after which the run ends, naming the blocking rank, step and phase; 0: off."""
