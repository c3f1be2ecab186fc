"""A checkpoint: a Hugging Face folder with the optimizer and the run's state beside the model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lockstep.data import Tokenizer
from lockstep.errors import UserError
from lockstep.model import Decoder, save_model

OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"


def save_checkpoint(
    folder: Path, model: Decoder, tokenizer: Tokenizer, tensors: dict[str, Tensor], state: dict[str, Any]
) -> None:
    """Writes model, tokenizer, the optimizer's `tensors` and `state` (JSON), then renames the whole to `folder`.

    So a checkpoint that has its name is whole. An older one of the same name is replaced.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_model(model, partial)
    tokenizer.save(partial)
    save_file({name: t.contiguous() for name, t in tensors.items()}, partial / OPTIMIZER_FILE)
    (partial / STATE_FILE).write_text(json.dumps(state, indent=1))
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def load_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's tensors and the state that `save_checkpoint` was given. Raises UserError, naming the folder."""
    try:
        state: dict[str, Any] = json.loads((folder / STATE_FILE).read_text())
        with safe_open(folder / OPTIMIZER_FILE, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, state  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(
            f"{folder}: cannot be resumed from ({error}); delete this checkpoint to use an older one, or start "
            "again with --overwrite"
        ) from error
