"""How a run samples: which prompts a rank requests, from which generators, and where its conversations run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from lockstep.config import RLConfig
from lockstep.generate import Engine
from lockstep.generate.driver import DriverEngine
from lockstep.generate.sampler import Sampler
from lockstep.observe import Timeline
from lockstep.rl.conversations.protocol import ConversationEnvironment
from lockstep.rl.conversations.rendering import Rendering
from lockstep.rl.environments.loading import EnvironmentSource
from lockstep.rl.environments.protocol import Environment, Example
from lockstep.rl.generators.protocol import Generators
from lockstep.rl.grading import Grader, Outcome
from lockstep.rl.grading.pool import GraderPool, open_grader, progress_timeout
from lockstep.rl.rollouts.collect import collect, training_params, validation_params
from lockstep.rl.rollouts.records import Rollout
from lockstep.rl.rollouts.replicas import Replicas
from lockstep.rl.rollouts.rewards import assign_rewards
from lockstep.run.stop import StopSignal

POLLING_STEPS = 4
"""Steps of an engine that ranks share between two polls for a signal."""
RolloutReplay = Callable[[Sequence[Example]], list[Rollout]]
"""Returns recorded rollouts of these examples."""


class Graders(NamedTuple):
    """What grades a run's rollouts."""

    rewards: Grader
    conversations: Grader
    """What runs conversations, in processes apart from those of rewards if later steps are sampled meanwhile."""


def open_graders(
    config: RLConfig, environment: Environment, is_given: bool, run: Path, timeline: Timeline, opened: ExitStack
) -> Graders:
    """The graders of a run, which closing `opened` ends.

    is_given: whether `environment` is the caller's object, which workers cannot load. Raises UserError as
    `open_grader`.
    """
    source = None if is_given else EnvironmentSource(config.environment, config.data, config.skip_bad_lines)
    rewards = opened.enter_context(open_grader(environment, config.rewards, source, run, timeline.moved))
    if isinstance(rewards, GraderPool):
        timeline.awaited = rewards.awaited
    conversations = rewards
    # Conversations of later steps run while this step's are graded, one step after another.
    if isinstance(environment, ConversationEnvironment) and config.actors.max_staleness:
        conversations = opened.enter_context(open_grader(environment, config.rewards, source, run, timeline.moved))
    return Graders(rewards, conversations)


class Sampling:
    """Samples and grades a run's rollouts on each of its ranks."""

    def __init__(
        self,
        config: RLConfig,
        environment: Environment,
        rendering: Rendering,
        generators: Generators,
        replicas: Replicas,
        graders: Graders,
        stop: StopSignal,
        recorded: RolloutReplay | None,
    ):
        """recorded: used instead of sampling."""
        self._environment, self._rendering, self._graders = environment, rendering, graders
        self.replicas, self._generators = replicas, generators
        self._recorded, self._stop, self._rewards, self._seed = recorded, stop, config.rewards, config.seed
        self.is_recorded = recorded is not None
        """Whether the rollouts are those of another run, as stale as that run allowed."""
        self._params = training_params(config, environment, rendering)
        self._validation_params, self._validation_seed = validation_params(config, environment, rendering)
        self.is_conversational = isinstance(environment, ConversationEnvironment)
        """Whether rollouts are conversations."""
        self._one_step = threading.Lock() if self.is_conversational else nullcontext()
        """Serializes steps: conversations of two steps do not overlap."""
        self.waits_for = "the generators" if config.actors.separate else ""
        """Whom the watchdog blames if no samples arrive."""
        self.grading_seconds = progress_timeout(graders.rewards)
        """How long grading may take without any progress."""
        self.start_seconds = config.actors.start_seconds if config.actors.separate else 0.0
        """How long there may be no generator at all."""
        self.other_ranks = "the other ranks" if replicas.world.size > 1 else ""
        """Whom the watchdog blames while this rank waits for all rollouts."""
        self._poll = stop.polling(lambda received: max(replicas.gather(received)))
        self.samples_together = len(replicas.ranks) > 1 and not config.actors.separate
        """Whether tensor-parallel ranks sample together."""
        if self.samples_together and not self.is_conversational:
            assert isinstance(generators.sampler, Engine) and replicas.world.tensor_group is not None
            generators.sampler.before_step = stop.polling(
                partial(_sum_over, replicas.world.tensor_group), POLLING_STEPS
            )
        if self.samples_together and self.is_conversational and isinstance(generators.sampler, DriverEngine):
            generators.sampler.guard = stop.deferred

    @property
    def seconds(self) -> float:
        """How long sampling may take without any progress."""
        return max(self.grading_seconds if self.is_conversational else 0.0, self.start_seconds)

    @property
    def requests_at_once(self) -> bool:
        """Whether all samples of a step are requested in one `generate`, not one after another."""
        return not self.is_conversational

    def draw(
        self, examples: Sequence[Example], step: int, extra_round: int, sampler: Sampler, wanted: int
    ) -> list[Rollout]:
        """This rank's share of the rollouts of a step's round, not graded. wanted: how many groups are enough."""
        if self._recorded:
            return self._recorded(examples)
        groups, first = self.replicas.share_of(examples, wanted)
        with self._one_step, self._requests() as requests:
            if not requests:
                return []
            return collect(
                groups,
                self._params,
                [self._seed, step, extra_round],
                self._environment,
                sampler,
                self._rendering,
                self._graders.conversations,
                first,
            )

    def evaluate(self, held_out: Sequence[Example]) -> list[Rollout]:
        """This rank's share of a validation, graded. Raises Interrupted if a signal interrupts it on this rank."""
        groups, _ = self.replicas.share_of(held_out, len(held_out))
        rollouts: list[Rollout] = []
        with self.interruptible(), self._requests() as requests:
            if requests:
                rollouts = collect(
                    groups,
                    self._validation_params,
                    self._validation_seed,
                    self._environment,
                    self._generators.sampler,
                    self._rendering,
                    self._graders.rewards,
                )
        self.grade(rollouts)
        return rollouts

    def grade(self, rollouts: Sequence[Rollout]) -> list[Outcome]:
        """As `assign_rewards`. Raises Interrupted if a signal interrupts it on this rank."""
        with self._stop.interruptible():
            return assign_rewards(rollouts, self._environment, self._rewards, self._graders.rewards)

    def interruptible(self) -> AbstractContextManager[None]:
        """For sampling in the main thread: at once on this rank alone, or where ranks that sample together poll."""
        return self._stop.interruptible(shared=self.samples_together)

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """For work that all ranks share: one process is interrupted at once, several at the end."""
        with self._stop.interruptible(shared=self.replicas.world.size > 1):
            yield
        self.raise_if_interrupted()

    def raise_if_interrupted(self) -> None:
        """Raises Interrupted on all ranks if any has received a signal."""
        with self._stop.interruptible(shared=True):
            self._poll()

    def gather(
        self, examples: Sequence[Example], rollouts: list[Rollout], outcomes: Sequence[Outcome] = ()
    ) -> tuple[list[Rollout], list[Outcome]]:
        """As `Replicas.gather_rollouts`. Raises Interrupted on all ranks if any has received a signal."""
        self.raise_if_interrupted()
        return self.replicas.gather_rollouts(examples, rollouts, outcomes)

    @contextmanager
    def _requests(self) -> Iterator[bool]:
        """Whether this rank requests samples itself, instead of only following another one."""
        with self._generators.conversing() if self.is_conversational else nullcontext(True) as requests:
            # Of conversations, only what the driver's engine computes has to end on all ranks.
            drives = self.samples_together and self.is_conversational and requests
            with self._stop.interruptible() if drives else nullcontext():
                yield requests


def _sum_over(group: dist.ProcessGroup, value: float) -> float:
    total = torch.tensor([value])
    dist.all_reduce(total, group=group)
    return total.item()
