"""Opens a folder's model for inference on this machine."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch

from lockstep import model, ops
from lockstep.checkpoint.folders import STATE, weights_folder
from lockstep.config import ParallelConfig, PrecisionConfig
from lockstep.errors import UserError
from lockstep.host_memory import keep_freed_memory
from lockstep.hub import is_model, local_folder, with_family_of
from lockstep.model import Decoder, arithmetic_of, is_auto, open_device, set_arithmetic
from lockstep.model.families.own import know_family
from lockstep.observe.logs import log
from lockstep.parallel import World, generator_model


def load_model(path: str | Path, dtype: str | torch.dtype | None = None, device: str | torch.device = "cpu") -> Decoder:
    """A Hugging Face folder, a run's folder (its newest checkpoint) or a model on the hub as a Decoder.

    `dtype` defaults to that of the folder. Raises UserError as `lockstep.model.load_model` does.
    """
    return model.load_model(model_folder(path), dtype, device)


def open_model(
    folder: Path,
    dtype: str = "auto",
    device: str = "",
    arithmetic: str = "auto",
    world: World | None = None,
    chunks: int = 0,
    precision: PrecisionConfig | None = None,
    replaceable: bool = False,
) -> Decoder:
    """The model, by default in its own dtype, on the accelerator, in the arithmetic of its run.

    In a world with a tensor axis, this rank's part. `chunks`: as `RanksConfig.reduction_chunks`. `precision`: by
    default the one that it was trained in. Unless they are `replaceable`, weights of layers that compute in integers
    are only these (`Decoder.pack_frozen`). If this machine lacks
    the instructions of the run's arithmetic, warns and uses another; an emulated arithmetic is used only on request. On
    the CPU, the process then keeps the memory it frees. Raises UserError for what is not available.
    """
    model.refuse_score_head(model.read_config(folder), str(folder))
    place = open_device(device) if world is None else world.device
    trained_in = trained_arithmetic(folder)
    slow = ops.is_emulated(trained_in)
    try:
        set_arithmetic(arithmetic, place, "" if slow else trained_in)
    except UserError:
        if arithmetic != "auto":
            raise
        set_arithmetic("auto", place)
    world = world or World(place)
    if chunks or world.degrees["tensor"] > 1:
        opened = _local_part(folder, dtype, world, chunks)
    else:
        opened = model.load_model(folder, None if is_auto(dtype) else dtype, place)
    opened.set_precision((precision or PrecisionConfig()).of_model(opened.config.precision, compared=True))
    if not replaceable:
        opened.requires_grad_(False).pack_frozen()
    if place.type == "cpu":
        keep_freed_memory()
    if trained_in not in ("", arithmetic_of(place)):
        log.warning(
            "%s was trained in %s arithmetic and is computed in %s here: log-probabilities differ from those of its "
            "run in the last bits%s",
            folder,
            trained_in,
            arithmetic_of(place),
            f"; --arithmetic {trained_in} gives the same bits, many times slower" if slow else "",
        )
    return opened


def warn_about_reduction_chunks(folder: Path, chunks: int) -> None:
    """Warns if a checkpoint of a run is computed with another number of reduction chunks than in the run."""
    trained_with = model.read_config(folder).reduction_chunks
    if trained_with != chunks and (trained_with > 1 or trained_arithmetic(folder)):
        log.warning(
            "%s was trained with reduction_chunks %d, but %d are used here: log-probabilities differ from those of its "
            "run in the last bits; one process gives the bits of this one with --parallel.reduction-chunks %d",
            folder,
            trained_with,
            chunks,
            chunks,
        )


def _local_part(folder: Path, dtype: str, world: World, chunks: int) -> Decoder:
    if len(set(world.gather(arithmetic_of(world.device)))) > 1:
        set_arithmetic("portable", world.device)
    kind = model.folder_dtype(folder) if is_auto(dtype) else model.resolve_dtype(dtype)
    parallel = ParallelConfig(tensor=world.degrees["tensor"], reduction_chunks=chunks)
    fill = partial(model.load_weights, path=folder)
    part = generator_model(model.read_config(folder), kind, world, parallel, fill)
    if world.is_main:
        warn_about_reduction_chunks(folder, part.config.reduction_chunks)
    return part


def model_folder(name: str | Path) -> Path:
    """The folder that `name` refers to: a run's newest checkpoint, a model's folder, or a download of the hub's model.
    This process then knows the user's family that it may begin with.

    Raises UserError if there is none.
    """
    know_family(name)
    return weights_folder(local_folder(name))


def folder_of_ranks(name: str, world: World) -> Path:
    """`model_folder` on all ranks; rank 0 downloads what is missing."""
    know_family(name)
    return Path(world.from_main(lambda: str(model_folder(name))))


def folder_if_model(name: str) -> str:
    """`model_folder` of a name that may be a model, after its family's file, if any; any other name, such as a preset
    or an empty one, unchanged."""
    know_family(name)
    return with_family_of(name, model_folder(name)) if is_model(name) else name


def trained_arithmetic(folder: Path) -> str:
    """The arithmetic that a run's checkpoint was computed in; empty for any other folder."""
    try:
        return str(json.loads((folder / STATE).read_text()).get("arithmetic", ""))
    except (OSError, ValueError, AttributeError):
        return ""
