"""Opens a run's generators: an engine on every training rank, or separate processes and servers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from lockstep.config import RLConfig, algorithm_of
from lockstep.data import Tokenizer
from lockstep.model import TrainableModel
from lockstep.parallel import World
from lockstep.rl.generators.colocated import ColocatedGenerator
from lockstep.rl.generators.models import sampling_model
from lockstep.rl.generators.policy_replica import PolicyReplica
from lockstep.rl.generators.protocol import Generators
from lockstep.rl.scoring.reference import is_own_base


def scores_with_policy(config: RLConfig) -> bool:
    """Whether the training ranks run the policy's forward even with separate generators: for its values, or for a
    reference that is the policy with its adapter off."""
    return algorithm_of(config).advantage == "gae" or is_own_base(config)


def resolve_generator_settings(config: RLConfig, world: World) -> RLConfig:
    """`config` with the settings that its generators require. Raises UserError if their servers or workers do not
    answer."""
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
    """The generators that `config.actors` describes; closing `opened` ends them.

    model: the policy. run: the run's folder. moved: called as weights are transferred. Raises UserError if they cannot
    be started.
    """
    separate = config.actors.separate
    replica = None
    if not separate or scores_with_policy(config):
        sampled = sampling_model(config, world, model)
        replica = PolicyReplica(sampled, model, world, config.actors.keep_copy, moved)
    if not separate:
        assert replica is not None
        colocated = ColocatedGenerator(replica, world, config.engine, tokenizer)
        if config.resume and config.engine.draft == "auto":
            colocated.recall(run)
        return colocated
    from lockstep.rl.generators.separate import SeparateGenerators

    return opened.enter_context(SeparateGenerators(config, world, model, run, replica))
