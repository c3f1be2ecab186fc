"""A folder's model, ready to compute on this machine: for commands that only read it."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from lockstep import model
from lockstep.checkpoint.checkpoints import STATE, weights_folder
from lockstep.errors import UserError
from lockstep.hub import is_model, local_folder
from lockstep.model import Decoder, arithmetic_of, is_auto, open_device, set_arithmetic
from lockstep.observe.logs import log


def load_model(path: str | Path, dtype: str | torch.dtype | None = None, device: str | torch.device = "cpu") -> Decoder:
    """A Hugging Face folder, a run's folder (its newest checkpoint) or a model of the hub as a Decoder.

    `dtype` is the folder's own unless given. Raises UserError as `lockstep.model.load_model` does.
    """
    return model.load_model(model_folder(path), dtype, device)


def open_model(folder: Path, dtype: str = "auto", device: str = "", arithmetic: str = "auto") -> Decoder:
    """The model in its own dtype, on the accelerator, in the arithmetic of its run, unless others are given.

    Where this machine cannot compute as the run did, a warning names both. Raises UserError for what cannot be had.
    """
    place = open_device(device)
    trained_in = trained_arithmetic(folder)
    try:
        set_arithmetic(arithmetic, place, trained_in)
    except UserError:
        if arithmetic != "auto":
            raise
        set_arithmetic("auto", place)
    opened = model.load_model(folder, None if is_auto(dtype) else dtype, place)
    if trained_in not in ("", arithmetic_of(place)):
        log.warning(
            "%s was trained in %s arithmetic and is computed in %s here: log-probabilities differ from those of its "
            "run in their last bits",
            folder,
            trained_in,
            arithmetic_of(place),
        )
    return opened


def model_folder(name: str | Path) -> Path:
    """The folder that `name` stands for: a run's newest checkpoint, a model's folder, or a download of the hub's model.

    Raises UserError if there is none.
    """
    return weights_folder(local_folder(name))


def folder_if_model(name: str) -> str:
    """`model_folder` of what may be a model; any other name, such as a preset's or none, as it is."""
    return str(model_folder(name)) if is_model(name) else name


def trained_arithmetic(folder: Path) -> str:
    """The arithmetic that a run's checkpoint was made in; empty for any other folder."""
    try:
        return str(json.loads((folder / STATE).read_text()).get("arithmetic", ""))
    except (OSError, ValueError, AttributeError):
        return ""
