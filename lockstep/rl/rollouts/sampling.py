"""How a run samples: which prompts a rank requests, from whom, and where its conversations run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from lockstep.config import RLConfig
from lockstep.data import Tokenizer
from lockstep.generate import Engine
from lockstep.generate.driver import DriverEngine
from lockstep.generate.sampler import Sampler
from lockstep.observe import Timeline
from lockstep.rl.conversations.protocol import ConversationEnvironment
from lockstep.rl.conversations.rendering import Rendering
from lockstep.rl.environments.loading import EnvironmentSource
from lockstep.rl.environments.protocol import Environment, Example
from lockstep.rl.generators.protocol import Generators
from lockstep.rl.grading import Outcome
from lockstep.rl.grading.pool import Workers, open_grader, progress_timeout
from lockstep.rl.rollouts.collect import assign_rewards, collect, sample_held_out
from lockstep.rl.rollouts.records import Rollout
from lockstep.rl.rollouts.replicas import Replicas
from lockstep.run.stop import StopSignal

EVERY = 4
"""Steps of an engine that ranks share between two polls for a signal."""
Draws = Callable[[Sequence[Example]], list[Rollout]]
"""Returns recorded rollouts of these examples."""


class Sampling:
    """Draws a run's rollouts on each of its ranks, and holds the grader for them."""

    def __init__(
        self,
        config: RLConfig,
        environment: Environment,
        is_given: bool,
        tokenizer: Tokenizer,
        rendering: Rendering,
        replicas: Replicas,
        generators: Generators,
        recorded: Draws | None,
        run: Path,
        timeline: Timeline,
        stop: StopSignal,
        opened: ExitStack,
    ):
        """is_given: whether `environment` is the caller's object, which workers cannot load. recorded: used instead of
        sampling. `opened` ends the graders."""
        self._config, self._environment, self._tokenizer = config, environment, tokenizer
        self._rendering, self.replicas, self._generators = rendering, replicas, generators
        self._recorded, self._stop = recorded, stop
        self.is_recorded = recorded is not None
        """Whether the rollouts are those of another run."""
        self.talks = isinstance(environment, ConversationEnvironment)
        source = None if is_given else EnvironmentSource(config.environment, config.data, config.skip_bad_lines)
        self.grader = opened.enter_context(open_grader(environment, config.rewards, source, run, timeline.moved))
        if isinstance(self.grader, Workers):
            timeline.awaited = self.grader.awaited
        # Conversations of later steps run while this step's are graded, one step after another.
        self._talking, self._conversing = threading.Lock(), self.grader
        if self.talks and config.actors.max_staleness:
            conversing = open_grader(environment, config.rewards, source, run, timeline.moved)
            self._conversing = opened.enter_context(conversing)
        self.waits_for = "the generators" if config.actors.separate else ""
        """Whom the watchdog blames if no samples arrive."""
        self.grading_seconds = progress_timeout(self.grader)
        """How long grading may take without any progress."""
        self.start_seconds = config.actors.start_seconds if config.actors.separate else 0.0
        """How long there may be no generator at all."""
        self.other_ranks = "the other ranks" if replicas.world.size > 1 else ""
        """Whom the watchdog blames while this rank waits for all rollouts."""
        self._poll = stop.polling(lambda received: max(replicas.gather(received)))
        self.together = len(replicas.ranks) > 1 and not config.actors.separate
        """Whether tensor-parallel ranks sample together."""
        if self.together and not self.talks:
            assert isinstance(generators.sampler, Engine) and replicas.world.tensor_group is not None
            generators.sampler.before_step = stop.polling(partial(_sum_over, replicas.world.tensor_group), EVERY)
        if self.together and self.talks and isinstance(generators.sampler, DriverEngine):
            generators.sampler.guard = stop.deferred

    @property
    def seconds(self) -> float:
        """How long sampling may take without any progress."""
        return max(self.grading_seconds if self.talks else 0.0, self.start_seconds)

    def draw(
        self, asked: Sequence[Example], step: int, extra_round: int, sampler: Sampler, wanted: int
    ) -> list[Rollout]:
        """As `prefetcher.Draw`: this rank's share."""
        if self._recorded:
            return self._recorded(asked)
        own, first = self.replicas.own(asked, wanted)
        with self._talking if self.talks else nullcontext(), self._requests() as requests:
            if not requests:
                return []
            return collect(
                asked, self._environment, sampler, self._tokenizer, self._config, step, extra_round, self._rendering,
                self._conversing, own, first,
            )  # fmt: skip

    def evaluate(self, held_out: Sequence[Example]) -> list[Rollout]:
        """This rank's share of a validation, graded. Raises Interrupted if a signal interrupts it on this rank."""
        own, _ = self.replicas.own(held_out, len(held_out))
        rollouts: list[Rollout] = []
        with self.interruptible(), self._requests() as requests:
            if requests:
                rollouts = sample_held_out(
                    held_out, self._environment, self._generators.sampler, self._tokenizer, self._config, self.grader,
                    self._rendering, own,
                )  # fmt: skip
        self.grade(rollouts)
        return rollouts

    def grade(self, rollouts: Sequence[Rollout]) -> list[Outcome]:
        """As `assign_rewards`. Raises Interrupted if a signal interrupts it on this rank."""
        with self._stop.interruptible():
            return assign_rewards(rollouts, self._environment, self._config.rewards, self.grader)

    def interruptible(self) -> AbstractContextManager[None]:
        """For sampling in the main thread: at once on this rank alone, or where ranks that sample together poll."""
        return self._stop.interruptible(shared=self.together)

    def raise_if_interrupted(self) -> None:
        """Raises Interrupted on all ranks if any has received a signal."""
        with self._stop.interruptible(shared=True):
            self._poll()

    def gather(
        self, examples: Sequence[Example], rollouts: list[Rollout], outcomes: Sequence[Outcome] = ()
    ) -> tuple[list[Rollout], list[Outcome]]:
        """As `Replicas.everyones`. Raises Interrupted on all ranks if any has received a signal."""
        self.raise_if_interrupted()
        return self.replicas.everyones(examples, rollouts, outcomes)

    @contextmanager
    def _requests(self) -> Iterator[bool]:
        """Whether this rank requests samples itself, instead of only following another one."""
        with self._generators.conversing() if self.talks else nullcontext(True) as requests:
            # Of conversations, only what the driver's engine computes has to end on all ranks.
            drives = self.together and self.talks and requests
            with self._stop.interruptible() if drives else nullcontext():
                yield requests


def _sum_over(group: dist.ProcessGroup, value: float) -> float:
    total = torch.tensor([value])
    dist.all_reduce(total, group=group)
    return total.item()
