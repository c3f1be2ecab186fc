"""What separate generators must match to sample for a run."""

from __future__ import annotations

import dataclasses
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep import ops
from lockstep.config import ActorsConfig, CompileConfig, EngineConfig
from lockstep.generate import SamplingParams
from lockstep.model import ModelConfig
from lockstep.rl.rollouts.plain import plain_shape


@dataclass(frozen=True)
class GeneratorSpec:
    """The policy's model and numerics, and how the run samples from it."""

    model: str
    """The folder that the run starts from."""
    shape: ModelConfig
    dtype: str
    arithmetic: str
    engine: EngineConfig
    compile: CompileConfig
    params: SamplingParams
    device: str = ""
    """As `RLConfig.device`, for the processes that the run starts."""

    @property
    def cache_tokens(self) -> int:
        """Capacity of a generator's cache: whole pages."""
        return self.engine.cache_tokens // ops.PAGE * ops.PAGE

    @property
    def context(self) -> int:
        """Most tokens of prompt and completion that the run may request."""
        return min(self.shape.max_positions, self.cache_tokens)

    def welcome(self, actors: ActorsConfig, run: Path) -> dict[str, Any]:
        """The trainer's first message to a generator process; JSON-able. run: the run's folder."""
        return {
            "model": self.model,
            "shape": plain_shape(self.shape),
            "dtype": self.dtype,
            "arithmetic": self.arithmetic,
            "reduction_chunks": self.shape.reduction_chunks,
            "engine": dataclasses.asdict(self.engine),
            "compile": dataclasses.asdict(self.compile),
            "on_update": actors.on_update,
            "silence_seconds": actors.silence_seconds,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "run": str(run.resolve()),
        }
