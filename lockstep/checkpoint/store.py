"""A checkpoint: a Hugging Face folder with the optimizer and the run's state beside the model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from lockstep.data import Tokenizer
from lockstep.errors import UserError
from lockstep.model import save_model
from lockstep.train.trainer import Trainer

OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"


def save_checkpoint(folder: Path, trainer: Trainer, tokenizer: Tokenizer, state: dict[str, Any]) -> None:
    """Writes model, tokenizer, optimizer and `state` (JSON) under a temporary name, then renames it to `folder`.

    So a checkpoint that has its name is whole. An older one of the same name is replaced.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_model(trainer.model, partial)
    tokenizer.save(partial)
    tensors = {name: t.contiguous() for name, t in trainer.optimizer.state_tensors().items()}
    save_file(tensors, partial / OPTIMIZER_FILE)
    (partial / STATE_FILE).write_text(json.dumps({"updates": trainer.updates, **state}, indent=1))
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def load_checkpoint(folder: Path, trainer: Trainer) -> dict[str, Any]:
    """Puts optimizer and master weights back into `trainer`, whose model they then fill. Returns the saved state.

    Raises UserError, naming the file, where the checkpoint is incomplete or of another model.
    """
    try:
        state: dict[str, Any] = json.loads((folder / STATE_FILE).read_text())
        with safe_open(folder / OPTIMIZER_FILE, framework="pt") as file:
            tensors: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        trainer.optimizer.load_state_tensors(tensors)
    except (OSError, KeyError, RuntimeError, ValueError) as error:
        raise UserError(
            f"{folder}: cannot be resumed from ({type(error).__name__}: {error}); "
            "delete this checkpoint to use an older one, or start again with --overwrite"
        ) from error
    trainer.updates = int(state["updates"])
    return state
