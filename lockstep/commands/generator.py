"""`lockstep generator`: samples for a run's trainer, which may be on another host."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass
class GeneratorOptions:
    """Sample for a reinforcement run; `lockstep rl` prints the command that joins it."""

    trainer: str
    """HOST:PORT of the run's trainer."""
    key: str
    """File with the run's key: logs/generators.key in the run's folder. `-`: read it from standard input."""
    name: str = ""
    """Name of this generator; empty: generator_N, the next free one."""
    device: str = ""
    """`cpu`, `cuda` or `cuda:1` …; empty: the machine's accelerator if it has one."""
    parent: int = 0
    """ID of a process with which this one ends; 0: none."""


def generator(options: GeneratorOptions) -> int:
    """Runs the command; returns its exit code. Raises UserError if the run cannot be joined."""
    from lockstep.workers.processes import die_with_parent

    if options.parent:
        die_with_parent()
        if os.getppid() != options.parent:
            return 1
    # Imported afterwards: importing torch takes seconds, in which the parent may end.
    import torch

    from lockstep.config import ParallelConfig
    from lockstep.parallel import close_world, open_world
    from lockstep.rl.generators.channel import key_of, read_key
    from lockstep.rl.generators.process import run_generator

    key = key_of(sys.stdin.readline(), "standard input") if options.key == "-" else read_key(Path(options.key))
    if count := torch.cuda.device_count():
        # Processes share GPUs if there are more processes than GPUs.
        os.environ["LOCAL_RANK"] = str(int(os.environ.get("LOCAL_RANK", 0)) % count)
    tensor = int(os.environ.get("WORLD_SIZE", 1))
    world = open_world(ParallelConfig(tensor=tensor, data_shard=1), options.device)
    try:
        return run_generator(options.trainer, key, options.name, world)
    finally:
        close_world(world)
