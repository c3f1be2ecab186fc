"""What a run logs, and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from lockstep.config.bounds import AtLeast


@dataclass
class ObserveConfig:
    """Metric sinks, traces, and settings that make runs comparable."""

    tensorboard: bool = False
    """Also write TensorBoard event files (needs the tensorboard package)."""
    wandb: bool = False
    """Also log to Weights & Biases (needs the wandb package; without a network set WANDB_MODE=offline)."""
    trackio: bool = False
    """Also log to trackio, which keeps runs on this machine (needs the trackio package)."""
    samples_every: Annotated[int, AtLeast(0)] = 10
    """rl: send 8 completions as a table to the trackers above, in the first step, every N steps, and at every
    validation; 0: never."""
    terminal: tuple[str, ...] = ()
    """Additional metrics to show on the terminal, by name, such as time/generate; * matches anything."""
    project: str = "lockstep"
    """Weights & Biases and trackio project; the run has the name of its folder there."""
    timeline_steps: Annotated[int, AtLeast(0)] = 200
    """Number of most recent steps whose phases are in timeline.json; 0: no timeline."""
    profile_steps: tuple[int, ...] = ()
    """Steps that the torch profiler records; writes a trace per rank to profile/."""
    memory_snapshot_steps: tuple[int, ...] = ()
    """Steps after which the CUDA allocator's history is written, one file per rank in profile/."""
    gc_every: Annotated[int, AtLeast(0)] = 50
    """Run Python's garbage collector on all ranks every N steps, and never in between; 0: leave it to Python."""
    deterministic: bool = False
    """Use only deterministic kernels, on CUDA too (the CPU's always are); slower, and operators without one raise an
    error."""
