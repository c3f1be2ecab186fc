"""A model that scores another model's tokens must have the same vocabulary."""

from __future__ import annotations

from pathlib import Path

from lockstep.data import Tokenizer, load_tokenizer
from lockstep.errors import UserError
from lockstep.hub import is_model
from lockstep.model import read_config


def refuse_other_vocabulary(folder: str, setting: str, model: str, tokenizer: Tokenizer) -> None:
    """Raises UserError, naming `setting`, if the model in `folder` has another vocabulary than the run's `model`."""
    if not is_model(folder):
        raise UserError(f"{setting} {folder}: no such model; give a folder with one")
    sizes = [read_config(Path(each)).vocab_size for each in (folder, model)]
    if sizes[0] != sizes[1] or load_tokenizer(folder, sizes[0]).vocabulary() != tokenizer.vocabulary():
        difference = f"{sizes[0]} tokens, not {sizes[1]}" if sizes[0] != sizes[1] else "other tokens for the same ids"
        raise UserError(
            f"{setting} {folder}: its vocabulary is not that of {model} ({difference}), so it cannot score that "
            "model's tokens; give a model with the same tokenizer"
        )
