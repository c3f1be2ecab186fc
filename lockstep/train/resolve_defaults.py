"""Resolves what a run's settings leave open, the same on all ranks: folders, arithmetic, reduction chunks, dtype."""

from __future__ import annotations

import dataclasses
import tomllib
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lockstep.checkpoint import folder_if_model, newest_checkpoint, warn_about_reduction_chunks
from lockstep.config import CONFIG, PretrainConfig, RLConfig, algorithm_of
from lockstep.config.toml import refuse_other_command
from lockstep.errors import UserError
from lockstep.hub import is_local, is_model, named_path, with_family_of
from lockstep.model import base_folder, choose_dtype, is_auto, read_config, set_arithmetic
from lockstep.observe.run_folder import is_restarted
from lockstep.observe.start import announce
from lockstep.parallel import World, chunks_for

Config = TypeVar("Config", bound=PretrainConfig | RLConfig)


def resolve_defaults(config: Config, world: World) -> Config:
    """`config` with model folders, `arithmetic`, `reduction_chunks`, `dtype` and its algorithm's settings resolved.

    A run's config.toml records them. A resumed run keeps the recorded ones unless others are set; a run that torchrun
    restarts is resumed. If ranks would use different arithmetics, all use the portable one. Raises UserError for what
    is not available here.
    """
    if world.from_main(lambda: is_restarted(config.output)):
        # The command is that of the first start, which may lack --resume and have --overwrite.
        config = dataclasses.replace(config, resume=True, overwrite=False)
    config = dataclasses.replace(config, model=world.from_main(lambda: _model_of(config)))
    folders: Any = _folders(config, world)
    config = dataclasses.replace(config, **folders)
    recorded = world.from_main(lambda: recorded_settings(config))
    dtype, why = recorded.get("dtype", ""), "as the run began"
    if not is_auto(config.dtype) or (not dtype and is_local(config.model)):
        dtype, why = world.from_main(lambda: choose_dtype(config.dtype, config.model, world.device))
    arithmetic = _arithmetic(config, world, recorded.get("arithmetic", ""), dtype)
    if not dtype:
        dtype, why = world.from_main(lambda: choose_dtype(config.dtype, config.model, world.device))
    if why:
        announce(f"dtype auto: {dtype}, {why}")
    resolved: Any = {"arithmetic": arithmetic, "dtype": dtype}
    resolved["parallel"] = dataclasses.replace(config.parallel, reduction_chunks=_chunks(config, world))
    if isinstance(config, RLConfig):
        resolved |= dataclasses.asdict(algorithm_of(config))
    return dataclasses.replace(config, **resolved)


def _chunks(config: PretrainConfig | RLConfig, world: World) -> int:
    """The run's reduction chunks; logs a warning if the model's run used others."""
    folder = named_path(config.model)
    trained_with = read_config(folder).reduction_chunks if is_local(folder) else 1
    parallel = config.parallel
    if isinstance(config, RLConfig):
        parallel = dataclasses.replace(parallel, tensor=max(parallel.tensor, config.actors.tensor))
    chunks = chunks_for(trained_with, parallel)
    if world.is_main and is_local(folder):
        warn_about_reduction_chunks(folder, chunks)
    return chunks


def _model_of(config: PretrainConfig | RLConfig) -> str:
    """The run's `model`; for a resumed run that trains an adapter, the folder of its base, which may have moved."""
    moved = config.resume and config.lora.rank and not is_model(config.model)
    newest = newest_checkpoint(Path(config.output)) if moved else None
    return with_family_of(config.model, base_folder(newest)) if newest is not None else config.model


def _folders(config: PretrainConfig | RLConfig, world: World) -> dict[str, str]:
    """The settings that name a model, replaced by its folder; rank 0 downloads what is missing."""
    settings = ("model", "tokenizer", "teacher", "kl_reference", "reference", "reward_model")
    named = {name: str(getattr(config, name)) for name in settings if hasattr(config, name)}
    if named.get("kl_reference") in ("start", "average"):
        del named["kl_reference"]
    for value in named.values():
        world.on_main(partial(folder_if_model, value))
    return {name: folder_if_model(value) for name, value in named.items()}


def recorded_settings(config: PretrainConfig | RLConfig) -> dict[str, str]:
    """Arithmetic, dtype and tokenizer of the run that is resumed; empty if there is none.

    Raises UserError if it is another command's run.
    """
    path = Path(config.output) / CONFIG
    if not config.resume or not path.is_file():
        return {}
    try:
        values = tomllib.loads(path.read_text())
    except (ValueError, RecursionError):
        return {}  # `claim_run` reports it
    refuse_other_command(config.output, values, config)
    names = ("arithmetic", "dtype", "tokenizer")
    return {name: str(values[name]) for name in names if values.get(name, "auto") != "auto"}


def _arithmetic(config: PretrainConfig | RLConfig, world: World, recorded: str, dtype: str) -> str:
    problem = chosen = ""
    if dtype == "float32" and config.arithmetic == "auto" and world.device.type == "cpu":
        # The other arithmetics apply only to bfloat16, so this run has the same bits everywhere, and compiling their
        # kernels would be wasted. If the portable ones cannot be compiled, PyTorch's operators are used.
        with suppress(UserError):
            chosen = set_arithmetic("portable", world.device)
    try:
        chosen = chosen or set_arithmetic(config.arithmetic, world.device, recorded)
    except UserError as error:
        problem = str(error)
    if problem := next(filter(None, world.gather(problem)), ""):
        raise UserError(problem)
    if len(set(world.gather(chosen))) > 1:
        chosen = set_arithmetic("portable", world.device)
    return chosen
