"""`lockstep compile COMMAND`: compiles what a run of COMMAND will call, before it starts."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import torch

from lockstep.config import CompileConfig, DPOConfig, PretrainConfig, RLConfig, validate
from lockstep.hub import is_local, local_folder, named_path
from lockstep.model import ModelConfig, initialize, preset, read_config, resolve_dtype
from lockstep.observe import announce
from lockstep.observe.machine import usable_cpus
from lockstep.parallel import World, close_world, open_world, parallel_model
from lockstep.parallel.compile import keep_artifacts
from lockstep.rl.generators.models import folder_shape, sampling_model
from lockstep.rl.generators.spec import compiled_generator
from lockstep.train.refusals import refuse_step
from lockstep.train.resolve_defaults import resolve_defaults
from lockstep.train.setup import adapted, trained_model, with_precision

BLOCKS_ALONE = 256
"""A vocabulary: embedding and head are not compiled, so any size will do."""


def compile_run(config: PretrainConfig | RLConfig) -> None:
    """Fills the cache with all that the run's ranks and the generators on its host compile; weights and data are not
    read.

    Generators of several tensor ranks, and those on other hosts, still compile at their first start. Under torchrun,
    every rank compiles its own part, as in the run. Raises UserError for settings that cannot work; what does not fit
    the data or the tokenizer is found by the run.
    """
    if config.compile.backend == "none":
        config = replace(config, compile=CompileConfig("inductor"))
    validate(config)
    world = open_world(config.parallel, config.device)
    try:
        config = resolve_defaults(config, world)
        if isinstance(config, PretrainConfig):
            refuse_step(config, world)
        began = time.perf_counter()
        _compile(config, world)
        announce(f"compiled in {time.perf_counter() - began:.0f} s: {keep_artifacts()}")
    finally:
        close_world(world)


def _compile(config: PretrainConfig | RLConfig, world: World) -> None:
    """Makes the models that the run makes, with random weights."""
    fill = partial(initialize, seed=config.seed)
    model = trained_model(config, _shape(config), world, fill)
    if isinstance(config, DPOConfig) and config.reference:
        shape, kind = with_precision(read_config(named_path(config.reference)), config), resolve_dtype(config.dtype)
        parallel_model(shape, kind, world, config.parallel, config.compile, fill, config.recompute)
    if not isinstance(config, RLConfig):
        return
    if not config.actors.separate:
        sampling_model(model, world, config.dtype, config.parallel, config.compile)
    elif world.is_main and config.actors.tensor == 1:
        torch._dynamo.reset()  # a generator's process finds nothing compiled
        # As `start_ranks` gives it: the loops of a process with one thread are compiled without threads.
        torch.set_num_threads(config.actors.threads or max(1, usable_cpus() // max(1, config.actors.generators)))
        compiled_generator(model.config, config.dtype, config.compile, World(world.device))


def _shape(config: PretrainConfig | RLConfig) -> ModelConfig:
    folder = named_path(config.model)
    if isinstance(config, RLConfig):
        shape = folder_shape(local_folder(config.model), config.model)
    else:
        shape = read_config(folder) if is_local(folder) else preset(config.model, BLOCKS_ALONE)
    return adapted(shape, config.lora, config.model) if config.lora.rank else shape
