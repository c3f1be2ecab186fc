"""The torch profiler and the CUDA allocator's history, at chosen steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from lockstep.config import ObserveConfig
from lockstep.errors import UserError

TABLE_ROWS = 30
ALLOCATIONS = 100_000
"""The number of most recent allocations and frees in a memory snapshot."""


def require_profiling(config: ObserveConfig, device: torch.device) -> None:
    """Raises UserError if a memory snapshot is requested on a CPU."""
    if config.memory_snapshot_steps and device.type != "cuda":
        raise UserError(
            f"observe.memory_snapshot_steps needs a CUDA device, because it records CUDA's allocator; this run is on "
            f"{device}. Remove it; memory_gib is in the metrics"
        )


class Profiling:
    """Writes `profile/step_N_rank_R.json` (a trace), `.txt` (the most expensive operators) and `.pickle` (memory)."""

    def __init__(self, config: ObserveConfig, run: Path, rank: int):
        self.config = config
        self.folder = run / "profile"
        self.rank = rank

    def __enter__(self) -> Profiling:
        if self.config.memory_snapshot_steps:
            torch.cuda.memory._record_memory_history(max_entries=ALLOCATIONS)
        return self

    def __exit__(self, *_: object) -> None:
        if self.config.memory_snapshot_steps:
            torch.cuda.memory._record_memory_history(enabled=None)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Records this context if `step` is one of the configured steps."""
        if step not in {*self.config.profile_steps, *self.config.memory_snapshot_steps}:
            yield
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step_{step:08}_rank_{self.rank}"
        if step in self.config.profile_steps:
            with profile(activities=_activities()) as recorded:
                yield
            recorded.export_chrome_trace(f"{path}.json")
            by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
            Path(f"{path}.txt").write_text(recorded.key_averages().table(sort_by=by, row_limit=TABLE_ROWS))
        else:
            yield
        if step in self.config.memory_snapshot_steps:
            torch.cuda.memory._dump_snapshot(f"{path}.pickle")


def _activities() -> list[ProfilerActivity]:
    cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return [ProfilerActivity.CPU, *cuda]
