"""Where rewards run, their limits, and what happens to a rollout whose reward failed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from lockstep.config.bounds import Above, AtLeast, AtMost


@dataclass
class RewardConfig:
    """Limits of rewards."""

    isolate: Literal["auto", "always", "never"] = "auto"
    """Whether rewards and conversations run in worker processes, where the limits apply. auto: for FILE.py:Class,
    `gymnasium:ID` and `verifiers:TASKSET`, and the built-in tasks `math` and `code`. An environment that is passed
    as an object always runs in the trainer's process."""
    workers: Annotated[int, AtLeast(0)] = 0
    """Worker processes; 0: half the number of processors, at most 8."""
    seconds: Annotated[float, Above(0)] = 10.0
    """Time limit of one reward, and of a conversation's environment from one reply to the next."""
    memory_gib: Annotated[float, Above(0)] = 4.0
    """Memory limit of a worker process and of each process that it starts, including the environment's data."""
    processes: Annotated[int, AtLeast(0)] = 32
    """Maximum number of concurrent processes started by one worker."""
    output_kib: Annotated[int, Above(0)] = 256
    """Output limit of one reward; a worker's log in the run's folder is truncated to it, too."""
    concurrent: Annotated[int, Above(0)] = 32
    """Per worker: maximum number of rewards awaited concurrently, if they are coroutines, and of conversations that are
    not waiting for the model. Up to four times as many conversations can have begun."""
    on_failure: Literal["drop", "zero"] = "drop"
    """`drop` leaves a rollout whose reward failed out of advantages and loss; `zero` gives it the reward 0."""
    failure_limit: Annotated[float, AtLeast(0), AtMost(1)] = 0.25
    """The run ends at a step in which a larger share of the rewards failed, over all rounds of dynamic sampling."""
