"""What a run leaves open, settled before it starts: its arithmetic, its sums' chunks and its dtype, on all ranks."""

from __future__ import annotations

import dataclasses
import tomllib
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lockstep.checkpoint import folder_if_model, name_other_chunks
from lockstep.config import PretrainConfig, RLConfig, algorithm_of
from lockstep.config.toml import refuse_other_command
from lockstep.errors import UserError
from lockstep.model import choose_dtype, is_auto, read_config, set_arithmetic
from lockstep.observe.run_folder import CONFIG, is_restarted
from lockstep.observe.start import announce
from lockstep.parallel import World, chunks_for

Config = TypeVar("Config", bound=PretrainConfig | RLConfig)


def settle(config: Config, world: World) -> Config:
    """`config` with models' folders, `arithmetic`, `reduction_chunks`, `dtype` and its algorithm's settings.

    A run's config.toml records them. A resumed run keeps its own, unless others are given; one that torchrun restarts
    is resumed. Rank 0 chooses the dtype; where ranks would compute in different arithmetics, all take the portable one.
    Raises UserError for what cannot be had here.
    """
    if world.from_main(lambda: is_restarted(config.output)):
        # With the command of the first start, which may lack the one and have the other.
        config = dataclasses.replace(config, resume=True, overwrite=False)
    folders: Any = _folders(config, world)
    config = dataclasses.replace(config, **folders)
    recorded = world.from_main(lambda: recorded_settings(config))
    arithmetic = _arithmetic(config, world, recorded.get("arithmetic", ""))
    dtype, why = recorded.get("dtype", ""), "as the run began"
    if not is_auto(config.dtype) or not dtype:
        # Measured on one rank: others may find otherwise.
        dtype, why = world.from_main(lambda: choose_dtype(config.dtype, config.model, world.device))
    if dtype == "float32" and config.arithmetic == "auto" and arithmetic in ("bf16_pairs", "bf16_tiles"):
        # Pairs are of bfloat16 alone: what such a run computes has the same bits everywhere.
        arithmetic = set_arithmetic("portable", world.device)
    if why:
        announce(f"dtype auto: {dtype}, {why}")
    settled: Any = {"arithmetic": arithmetic, "dtype": dtype}
    settled["parallel"] = dataclasses.replace(config.parallel, reduction_chunks=_chunks(config, world))
    if isinstance(config, RLConfig):
        settled |= dataclasses.asdict(algorithm_of(config))
    return dataclasses.replace(config, **settled)


def _chunks(config: PretrainConfig | RLConfig, world: World) -> int:
    """The run's; a warning names those of the model's own run where they are others."""
    folder = Path(config.model)
    own = read_config(folder).reduction_chunks if folder.is_dir() else 1
    parallel = config.parallel
    if isinstance(config, RLConfig):
        parallel = dataclasses.replace(parallel, tensor=max(parallel.tensor, config.actors.tensor))
    chunks = chunks_for(own, parallel)
    if world.is_main and folder.is_dir():
        name_other_chunks(folder, chunks)
    return chunks


def _folders(config: PretrainConfig | RLConfig, world: World) -> dict[str, str]:
    """The settings that name a model, with its folder instead; rank 0 downloads what is not there."""
    settings = ("model", "tokenizer", "teacher", "kl_reference", "reference", "reward_model")
    named = {name: str(getattr(config, name)) for name in settings if hasattr(config, name)}
    if named.get("kl_reference") in ("start", "average"):
        del named["kl_reference"]
    for value in named.values():
        world.on_main(partial(folder_if_model, value))
    return {name: folder_if_model(value) for name, value in named.items()}


def recorded_settings(config: PretrainConfig | RLConfig) -> dict[str, str]:
    """Arithmetic, dtype and tokenizer of the run that is resumed; empty where there is none.

    Raises UserError where it is another command's.
    """
    path = Path(config.output) / CONFIG
    if not config.resume or not path.is_file():
        return {}
    try:
        values = tomllib.loads(path.read_text())
    except (ValueError, RecursionError):
        return {}  # open_run says so
    refuse_other_command(config.output, values, config)
    names = ("arithmetic", "dtype", "tokenizer")
    return {name: str(values[name]) for name in names if values.get(name, "auto") != "auto"}


def _arithmetic(config: PretrainConfig | RLConfig, world: World, recorded: str) -> str:
    problem = chosen = ""
    try:
        chosen = set_arithmetic(config.arithmetic, world.device, recorded)
    except UserError as error:
        problem = str(error)
    if problem := next(filter(None, world.gather(problem)), ""):
        raise UserError(problem)
    if len(set(world.gather(chosen))) > 1:
        chosen = set_arithmetic("portable", world.device)
    return chosen
