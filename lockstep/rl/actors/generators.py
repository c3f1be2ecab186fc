"""Who samples for a run, and how new weights come there: the ranks that train, or processes of their own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from lockstep.config import RLConfig
from lockstep.data import Tokenizer
from lockstep.generate import Engine
from lockstep.generate.sampler import Remembering, Sampler
from lockstep.model import ScoringModel, TrainableModel
from lockstep.parallel import World
from lockstep.rl.actors.models import sampling_model
from lockstep.rl.actors.weights import WeightTransfer


class Generators(Protocol):
    """A run's generators, as each of the trainer's ranks sees them."""

    @property
    def sampler(self) -> Sampler:
        """What this rank asks."""

    @property
    def remembering(self) -> Callable[[dict[str, Any]], Remembering] | None:
        """Makes samplers for steps that are sampled ahead, which go on from what another's `state` has kept."""

    def metrics(self) -> dict[str, float]:
        """What generators in processes of their own have done since the last call."""

    def trace_events(self) -> list[dict[str, Any]]:
        """When they did it, as Chrome's trace events."""

    @property
    def progress(self) -> int:
        """Grows while this rank's sampler gets samples."""

    def new_weights(self, version: int) -> None:
        """From here on the trainer's weights are sampled from as they are now. All ranks call it.

        Raises RunStopped where they do not arrive as they were sent, or no generator is left.
        """

    def training_begins(self) -> None:
        """Nothing is sampled or scored with the generators' weights from here to `new_weights`."""


class OwnGenerator:
    """An engine on every rank, which samples while nothing is trained.

    In one process it reads the trainer's own weights; else these too where the layouts allow it, and a copy of the
    others.
    """

    remembering = None

    def __init__(
        self,
        config: RLConfig,
        world: World,
        model: TrainableModel,
        tokenizer: Tokenizer,
        moved: Callable[[], None] = lambda: None,
    ):
        sampling = sampling_model(config, world, model)
        self.sampler = Engine(sampling, config.engine, tokenizer)
        tensors = dict(model.named_parameters())
        keep = config.actors.keep_copy
        self._transfer = None if sampling is model else WeightTransfer(tensors, sampling, world, moved, keep)

    @property
    def progress(self) -> int:
        return self.sampler.statistics.steps

    def metrics(self) -> dict[str, float]:
        return {}

    def trace_events(self) -> list[dict[str, Any]]:
        return []

    def new_weights(self, version: int) -> None:
        if self._transfer:
            self._transfer(version)
        self.sampler.weights_changed(version)

    def training_begins(self) -> None:
        if self._transfer and not self._transfer.keep:
            self.sampler.weights_away()
            self._transfer.drop()


def suited_to_actors(config: RLConfig, world: World) -> RLConfig:
    """`config` with the settings that its generators need. Raises UserError where what starts them is not there."""
    if config.actors.urls:
        from lockstep.rl.actors.http_generators import suited_to_servers

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
        return OwnGenerator(config, world, model, tokenizer, moved)
    from lockstep.rl.actors.separate import SeparateGenerators

    return opened.enter_context(SeparateGenerators(config, world, model, run))


def whole_policy(generators: Generators, policy: TrainableModel) -> ScoringModel:
    """What a rank computes the policy with alone: its generator's copy where it has one, else the policy itself."""
    own = generators.sampler.model if isinstance(generators, OwnGenerator) else policy
    assert isinstance(own, ScoringModel)
    return own
