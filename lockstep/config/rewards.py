"""Where rewards run, what they may take, and what becomes of a rollout whose reward failed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from lockstep.config.bounds import Above, AtLeast, AtMost


@dataclass
class RewardConfig:
    """Limits of rewards."""

    isolate: Literal["auto", "always", "never"] = "auto"
    """Whether rewards and conversations run in worker processes, where the limits hold. auto: for a FILE.py:Class, for
    `gymnasium:ID` and `verifiers:TASKSET`, and of the built-in tasks for `math` and `code`. An environment that is
    given as an object always runs in the trainer's own process."""
    workers: Annotated[int, AtLeast(0)] = 0
    """Worker processes; 0: half the number of processors, at most 8."""
    seconds: Annotated[float, Above(0)] = 10.0
    """Time limit of one reward, and of a conversation's environment from one reply to the next."""
    memory_gib: Annotated[float, Above(0)] = 4.0
    """Memory of a worker process and of each process that it starts, the environment's own data included."""
    processes: Annotated[int, AtLeast(0)] = 32
    """Maximum number of processes that a worker has started."""
    output_kib: Annotated[int, Above(0)] = 256
    """What one reward may print; a worker's log in the run's folder keeps as much, and drops the rest."""
    concurrent: Annotated[int, Above(0)] = 32
    """Rewards that a worker awaits at the same time, where they are coroutines; conversations that are not waiting for
    the model at the same time, per worker. Four times as many may have begun there."""
    on_failure: Literal["drop", "zero"] = "drop"
    """`drop` leaves a rollout whose reward failed out of advantages and loss; `zero` gives it the reward 0."""
    failure_limit: Annotated[float, AtLeast(0), AtMost(1)] = 0.25
    """The run ends at a step in which a larger share of the rewards failed, all rounds of dynamic sampling together."""
