"""Generators in processes of their own, beside the ranks that train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from lockstep.config.bounds import Above, AtLeast, AtMost


@dataclass
class ActorsConfig:
    """Generators that sample for a reinforcement run, how many and where."""

    generators: Annotated[int, AtLeast(0)] = 0
    """Processes, or tensor groups of them, that are started beside the trainer; 0: the ranks that train sample too."""
    tensor: int = 1
    """Ranks of each generator that share the model: 1, 2, 4 or 8."""
    threads: Annotated[int, AtLeast(0)] = 0
    """Of each generator's process; 0: an even share of the CPUs."""
    host: str = "127.0.0.1"
    """Address that generators on other hosts call (`lockstep generator`); by default there are none."""
    port: Annotated[int, AtLeast(0), AtMost(65535)] = 0
    """Port that they call; 0: any free one."""
    silence_seconds: Annotated[float, Above(0)] = 1.5
    """A generator that says nothing for so long is taken for dead; they say something five times as often."""
    start_seconds: Annotated[float, Above(0)] = 120.0
    """Time that the first generator is given to be ready, and a run without any to get another one."""

    @property
    def separate(self) -> bool:
        """Whether others than the training ranks sample."""
        return self.generators > 0
