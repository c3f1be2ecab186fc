"""Opens a run's policy and its generators: an engine on every training rank, or separate processes and servers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from lockstep.config import RLConfig, algorithm_of
from lockstep.data import Tokenizer
from lockstep.generate import SamplingParams
from lockstep.hub import local_folder
from lockstep.model import TrainableModel, arithmetic_of, begin_adapter, load_weights
from lockstep.observe import log
from lockstep.parallel import World
from lockstep.rl.generators.colocated import ColocatedGenerator
from lockstep.rl.generators.models import PolicyReplica, folder_shape, sampling_model
from lockstep.rl.generators.protocol import Generators
from lockstep.rl.generators.refusals import refuse_policy_for_generators, refuse_replay_without_experts
from lockstep.rl.generators.spec import GeneratorSpec
from lockstep.rl.scoring.reference import reference_is_base
from lockstep.rl.scoring.routes import routes_form
from lockstep.train.setup import adapted, trained_model


def resolve_generator_settings(config: RLConfig, world: World) -> RLConfig:
    """`config` with the settings that its generators require.

    The log-probabilities of vLLM servers differ from the trainer's: the difference is measured and, unless `off_policy`
    says otherwise, corrected for. Raises UserError, on all ranks, if a server or a Monarch worker does not answer.
    """
    if config.actors.urls:
        from lockstep.rl.generators.http_servers import servers_are_exact

        if not world.from_main(lambda: servers_are_exact(config.actors)):
            if config.off_policy == "none":
                log.warning("off_policy is none, so the difference in vLLM's log-probabilities biases the gradient")
            config = replace(config, off_policy=config.off_policy or "truncate", on_parity_error="measure")
    if config.actors.hosts:
        from lockstep.rl.generators.supervisor import require_workers

        world.on_main(lambda: require_workers(config.actors))
    return config


def open_policy(config: RLConfig, world: World) -> TrainableModel:
    """This rank's part of the policy, laid out as `config.parallel` says. Raises UserError as `trained_model` does."""
    folder = local_folder(config.model)
    shape = folder_shape(folder, config.model)
    fill: Callable[[TrainableModel], None] = partial(load_weights, path=folder)
    if config.lora.rank:
        shape = adapted(shape, config.lora, config.model)
        fill = partial(begin_adapter, path=folder, seed=config.seed)
    refuse_replay_without_experts(config, shape)
    refuse_policy_for_generators(shape, folder, config.dtype, config.actors, config.parallel, world)
    return trained_model(config, shape, world, fill)


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
    actors, replica = config.actors, None
    if not actors.separate or scores_with_policy(config):
        sampled = sampling_model(model, world, config.dtype, config.parallel, config.compile)
        replica = PolicyReplica(sampled, model, world, actors.keep_copy, moved)
    if not actors.separate:
        assert replica is not None
        colocated = ColocatedGenerator(replica, world, config.engine, tokenizer)
        if config.resume and config.engine.draft == "auto":
            colocated.recall(run)
        return colocated
    from lockstep.rl.generators.separate import SeparateGenerators

    spec = GeneratorSpec(
        model=config.model,
        shape=model.config,
        dtype=config.dtype,
        arithmetic=arithmetic_of(world.device),
        engine=config.engine,
        compile=config.compile,
        params=SamplingParams(
            n=config.samples_per_prompt,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p,
            routes=routes_form(config.router_replay, config.actors.separate),
        ),
        device=config.device,
    )
    return opened.enter_context(SeparateGenerators(spec, actors, model, world, run, replica))


def scores_with_policy(config: RLConfig) -> bool:
    """Whether the training ranks run the policy's forward even with separate generators: for its values, or for a
    reference that is the policy with its adapter off."""
    return algorithm_of(config).advantage == "gae" or reference_is_base(config)
