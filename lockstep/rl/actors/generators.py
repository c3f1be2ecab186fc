"""Who samples for a run, and how new weights come there: the ranks that train, or processes of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from lockstep.config import RLConfig, algorithm_of
from lockstep.data import Tokenizer
from lockstep.generate import Engine
from lockstep.generate.drafts import HistoryDraft, make_draft
from lockstep.generate.lead import LeadingEngine, follow
from lockstep.generate.sampler import Remembering, Sampler
from lockstep.model import ScoringModel, TrainableModel
from lockstep.parallel import World
from lockstep.rl.actors.models import sampling_model
from lockstep.rl.actors.weights import WeightTransfer
from lockstep.rl.actors.work_log import figures_of
from lockstep.rl.recorded import recall
from lockstep.rl.reference import is_own_base


class Generators(Protocol):
    """A run's generators, as each of the trainer's ranks sees them."""

    @property
    def sampler(self) -> Sampler:
        """What this rank asks."""

    @property
    def remembering(self) -> Callable[[dict[str, Any]], Remembering] | None:
        """Makes samplers for steps that are sampled ahead, which go on from what another's `state` has kept."""

    def metrics(self) -> dict[str, float]:
        """What each generator has done since the last call. All ranks call it."""

    def trace_events(self) -> list[dict[str, Any]]:
        """When they did it, as Chrome's trace events."""

    @property
    def policy(self) -> ScoringModel:
        """The newest weights, as this rank computes with them alone; for a value function, or a reference that is the
        policy without its adapter."""

    @property
    def progress(self) -> int:
        """Grows while this rank's sampler gets samples."""

    def new_weights(self, version: int) -> None:
        """From here on the trainer's weights are sampled from as they are now. All ranks call it.

        Raises RunStopped where they do not arrive as they were sent, or no generator is left.
        """

    def conversing(self) -> AbstractContextManager[bool]:
        """Within it conversations ask the sampler, where it gives True. All ranks enter it.

        A rank for which it gives False has computed with the one of its tensor group that asks, until that has left it.
        """

    def training_begins(self) -> None:
        """Nothing is sampled or scored with the generators' weights from here to `new_weights`."""


def scores_with_policy(config: RLConfig) -> bool:
    """Whether the ranks that train compute with the policy whoever samples: its values, or with its adapter off the
    reference."""
    return algorithm_of(config).advantage == "gae" or is_own_base(config)


class WholePolicy:
    """The policy as one rank, or one tensor group, computes with it alone.

    In one process it is the model that is trained; else that model's own tensors where the layouts allow it, and a copy
    of the others in the run's dtype.
    """

    def __init__(
        self, config: RLConfig, world: World, policy: TrainableModel, moved: Callable[[], None] = lambda: None
    ):
        self.model = sampling_model(config, world, policy)
        tensors = dict(policy.named_parameters())
        self._transfer = (
            None if self.model is policy else WeightTransfer(tensors, self.model, world, moved, config.actors.keep_copy)
        )

    def new_weights(self, version: int) -> None:
        """Takes the trainer's weights as they are now. All ranks call it. Raises RunStopped as `Generators` does."""
        if self._transfer:
            self._transfer(version)

    def training_begins(self, before_drop: Callable[[], None]) -> None:
        """Drops the copy where it is not kept, after who reads it has been told."""
        if self._transfer and not self._transfer.keep:
            before_drop()
            self._transfer.drop()


class OwnGenerator:
    """An engine on every rank, which samples while nothing is trained."""

    remembering = None

    def __init__(
        self,
        config: RLConfig,
        world: World,
        model: TrainableModel,
        tokenizer: Tokenizer,
        moved: Callable[[], None] = lambda: None,
    ):
        self._whole = WholePolicy(config, world, model, moved)
        self._follows = world.coordinate("tensor") > 0
        self._world, self._history = world, HistoryDraft()
        draft = make_draft(config.engine, self._whole.model, self._history)
        self.sampler: Engine
        if world.tensor_group is None or self._follows:
            self.sampler = Engine(self._whole.model, config.engine, tokenizer, draft)
        else:
            self.sampler = LeadingEngine(self._whole.model, config.engine, tokenizer, draft, leads=False)

        self._counted, self._asked_at = asdict(self.sampler.statistics), time.monotonic()

    @property
    def policy(self) -> ScoringModel:
        return self._whole.model

    @property
    def progress(self) -> int:
        return self.sampler.statistics.steps

    def metrics(self) -> dict[str, float]:
        """As `Generators`: of the engine in one process, else of each tensor group's, by its first rank."""
        before, self._counted = self._counted, asdict(self.sampler.statistics)
        asked_before, self._asked_at = self._asked_at, time.monotonic()
        new = {name: count - before[name] for name, count in self._counted.items()}
        own = figures_of(new, self._asked_at - asked_before)
        every = self._world.gather({} if self._follows else own)
        names = [f"rank_{rank}" for rank in range(len(every))] if len(every) > 1 else ["own"]
        return {
            f"generators/{name}/{key}": float(value) for name, each in zip(names, every) for key, value in each.items()
        }

    def recall(self, run: Path) -> None:
        """Guesses by what a resumed run has sampled; not where ranks share a model, which must all guess alike."""
        if self._world.tensor_group is None:
            recall(self._history, run)

    def trace_events(self) -> list[dict[str, Any]]:
        return []

    def new_weights(self, version: int) -> None:
        self._whole.new_weights(version)
        self.sampler.weights_changed(version)

    @contextmanager
    def conversing(self) -> Iterator[bool]:
        """As `Generators`: what is asked when depends on the environment, so one rank asks, and the others hear it."""
        if self._follows:
            follow(self.sampler)
        with self.sampler.leading() if isinstance(self.sampler, LeadingEngine) else nullcontext():
            yield not self._follows

    def training_begins(self) -> None:
        self._whole.training_begins(self.sampler.weights_away)


def suited_to_actors(config: RLConfig, world: World) -> RLConfig:
    """`config` with the settings that its generators need. Raises UserError where what starts them is not there."""
    if config.actors.urls:
        from lockstep.rl.actors.http_supervisor import suited_to_servers

        config = suited_to_servers(config, world)
    if config.actors.hosts:
        from lockstep.rl.actors.monarch_workers import require_workers

        world.on_main(lambda: require_workers(config.actors))
    return config


def open_generators(
    config: RLConfig,
    world: World,
    model: TrainableModel,
    tokenizer: Tokenizer,
    run: Path,
    opened: ExitStack,
    moved: Callable[[], None] = lambda: None,
) -> Generators:
    """The generators that `config.actors` asks for; `opened` ends them. Raises UserError where they cannot be had.

    `moved` is called while weights are on their way.
    """
    if not config.actors.separate:
        own = OwnGenerator(config, world, model, tokenizer, moved)
        if config.resume and config.engine.draft == "auto":
            own.recall(run)
        return own
    from lockstep.rl.actors.separate import SeparateGenerators

    whole = WholePolicy(config, world, model, moved) if scores_with_policy(config) else None
    return opened.enter_context(SeparateGenerators(config, world, model, run, whole))
