"""Metrics of a run's speed."""

from __future__ import annotations

import torch

from lockstep.data import Row, StepRows
from lockstep.model import ModelConfig
from lockstep.observe import Timeline, memory_gib, peak_flops, training_flops
from lockstep.parallel import World

PHASES = ("data", "forward", "backward", "optimizer")


class Throughput:
    """Turns a step's rows and times into tokens per second, TFLOP/s and, if known, the share of the peak."""

    def __init__(self, config: ModelConfig, world: World, dtype: torch.dtype):
        self.config, self.world = config, world
        # Measured by one rank while the others wait for it.
        self.peak = peak_flops(world.device, dtype) * world.size if world.is_main else 1.0

    def metrics(self, batch: StepRows, timeline: Timeline) -> dict[str, float]:
        """Metrics of the current step over all ranks; memory and times are this rank's. Called by every rank."""
        seconds = timeline.elapsed()
        rows = [row for rows in batch.microbatches for row in rows]
        local = training_flops(self.config, [n for row in rows for n in document_lengths(row)])
        local -= training_flops(self.config, [n for row in rows for n in row.shared or ()])
        (flops,) = self.world.sum([local], ("data_replicate", "data_shard"))
        return {
            "tokens": batch.tokens,
            "tokens_per_second": batch.tokens / seconds,
            "tflops": flops / seconds / 1e12,
            **({"mfu": flops / seconds / self.peak} if self.peak else {}),
            "memory_gib": memory_gib(self.world.device),
            "data/padding": 1 - batch.tokens / batch.capacity,
            **{f"time/{phase}": timeline.seconds(phase) for phase in PHASES},
            "time/step": seconds,
        }


def document_lengths(row: Row) -> list[int]:
    """The complete lengths of the row's sequences, without the padding that may be the last one."""
    lengths = row.complete_lengths()
    return lengths if row.scored[-row.lengths[-1] :].any() else lengths[:-1]
