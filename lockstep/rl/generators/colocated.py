"""Who samples for a run, and how it gets new weights: the ranks that train, or separate processes."""

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
from lockstep.generate.driver import DriverEngine, follow
from lockstep.generate.sampler import RecordingSampler, Sampler
from lockstep.model import Decoder, ScoringModel, TrainableModel
from lockstep.parallel import World
from lockstep.rl.generators.models import sampling_model
from lockstep.rl.generators.work_log import eval_metrics
from lockstep.rl.rollouts.recorded import recall
from lockstep.rl.scoring.reference import is_own_base
from lockstep.rl.weights.transfer import WeightTransfer


class Generators(Protocol):
    """A run's generators, as each of the trainer's ranks sees them."""

    @property
    def sampler(self) -> Sampler:
        """The sampler that this rank uses."""

    @property
    def remembering(self) -> Callable[[dict[str, Any]], RecordingSampler] | None:
        """Makes samplers for steps that are sampled ahead, which continue from another one's `state`."""

    def metrics(self) -> dict[str, float]:
        """What each generator has done since the last call. All ranks call it."""

    def trace_events(self) -> list[dict[str, Any]]:
        """When they did it, as Chrome trace events."""

    @property
    def policy(self) -> ScoringModel:
        """The newest weights, on this rank alone; for a value function, or a reference that is the policy without its
        adapter."""

    @property
    def progress(self) -> int:
        """Increases while this rank's sampler gets samples."""

    def new_weights(self, version: int) -> None:
        """Makes generators sample from the trainer's current weights from here on. All ranks call it.

        Raises RunStopped if they do not arrive intact, or no generator is left.
        """

    def conversing(self) -> AbstractContextManager[bool]:
        """Inside it, conversations use the sampler on ranks for which it yields True. All ranks enter it.

        A rank for which it yields False has followed its tensor group's driver until the driver left it.
        """

    def training_begins(self) -> None:
        """From here until `new_weights`, nothing is sampled or scored with the generators' weights."""

    @property
    def kept(self) -> Decoder | None:
        """The policy as this rank or its tensor group computes with it, also after `training_begins`; None if it then
        has no copy. After an update, tensors that are the trainer's own have its new values, and copies the old ones.
        """


def scores_with_policy(config: RLConfig) -> bool:
    """Whether the ranks that train run the policy's forward, whoever samples: for its values, or for the reference,
    which is the policy with its adapter off."""
    return algorithm_of(config).advantage == "gae" or is_own_base(config)


class WholePolicy:
    """The policy as one rank, or one tensor group, computes with it alone.

    In one process it is the trained model itself; otherwise that model's own tensors if the layouts allow it, and
    copies of the others in the run's dtype.
    """

    def __init__(
        self, config: RLConfig, world: World, policy: TrainableModel, moved: Callable[[], None] = lambda: None
    ):
        self.model = sampling_model(config, world, policy)
        tensors, keep = dict(policy.named_parameters()), config.actors.keep_copy
        frozen = [name for name, tensor in tensors.items() if not tensor.requires_grad]
        self._transfer = (
            None if self.model is policy else WeightTransfer(tensors, self.model, world, moved, keep, frozen)
        )

    def new_weights(self, version: int) -> None:
        """Takes the trainer's current weights. All ranks call it. Raises RunStopped as `Generators` does."""
        if self._transfer:
            self._transfer(version)

    @property
    def kept(self) -> Decoder | None:
        """As `Generators`."""
        return self.model if self._transfer is None or self._transfer.keep else None

    def training_begins(self, before_drop: Callable[[], None]) -> None:
        """Drops the copy if it is not kept, after calling `before_drop` to tell whoever reads it."""
        if self._transfer and not self._transfer.keep:
            before_drop()
            self._transfer.drop()


class ColocatedGenerator:
    """An engine on every rank, which samples while no training takes place."""

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
            self.sampler = DriverEngine(self._whole.model, config.engine, tokenizer, draft, drives=False)

        self._counted, self._asked_at = asdict(self.sampler.statistics), time.monotonic()

    @property
    def policy(self) -> ScoringModel:
        return self._whole.model

    @property
    def kept(self) -> Decoder | None:
        return self._whole.kept

    @property
    def progress(self) -> int:
        return self.sampler.statistics.steps

    def metrics(self) -> dict[str, float]:
        """As `Generators`: for the engine in one process, or for each tensor group's, named after its first rank."""
        before, self._counted = self._counted, asdict(self.sampler.statistics)
        asked_before, self._asked_at = self._asked_at, time.monotonic()
        new = {name: count - before[name] for name, count in self._counted.items()}
        own = eval_metrics(new, self._asked_at - asked_before)
        every = self._world.gather({} if self._follows else own)
        names = [f"rank_{rank}" for rank in range(len(every))] if len(every) > 1 else ["own"]
        return {
            f"generators/{name}/{key}": float(value) for name, each in zip(names, every) for key, value in each.items()
        }

    def recall(self, run: Path) -> None:
        """Drafts from what a resumed run has sampled; not if ranks share a model, which must all draft the same."""
        if self._world.tensor_group is None:
            recall(self._history, run)

    def trace_events(self) -> list[dict[str, Any]]:
        return []

    def new_weights(self, version: int) -> None:
        self._whole.new_weights(version)
        self.sampler.weights_changed(version)

    @contextmanager
    def conversing(self) -> Iterator[bool]:
        """As `Generators`: requests are timed by the environment, so one rank drives, and others follow."""
        if self._follows:
            follow(self.sampler)
        with self.sampler.driving() if isinstance(self.sampler, DriverEngine) else nullcontext():
            yield not self._follows

    def training_begins(self) -> None:
        self._whole.training_begins(self.sampler.release_weights)


def suited_to_actors(config: RLConfig, world: World) -> RLConfig:
    """`config` with the settings that its generators need. Raises UserError if what starts them is missing."""
    if config.actors.urls:
        from lockstep.rl.generators.http_supervisor import suited_to_servers

        config = suited_to_servers(config, world)
    if config.actors.hosts:
        from lockstep.rl.generators.monarch_workers import require_workers

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
    """The generators that `config.actors` asks for; `opened` ends them. Raises UserError if they cannot be started.

    `moved` is called as weights are transferred.
    """
    if not config.actors.separate:
        own = ColocatedGenerator(config, world, model, tokenizer, moved)
        if config.resume and config.engine.draft == "auto":
            own.recall(run)
        return own
    from lockstep.rl.generators.separate import SeparateGenerators

    whole = WholePolicy(config, world, model, moved) if scores_with_policy(config) else None
    return opened.enter_context(SeparateGenerators(config, world, model, run, whole))
