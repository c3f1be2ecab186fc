"""The settings of a model folder: its `config.json`, or what the metadata of its GGUF file stands for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.model.gguf import gguf_config, gguf_file
from lockstep.model.json_file import read_json

CONFIG = "config.json"
MAX_POSITIONS = "LOCKSTEP_MAX_POSITIONS"
"""Environment variable, set by `--max-positions`: the longest text, if it is less than a model's folder says."""


def holds_model(folder: Path) -> bool:
    """Whether there are a model's settings: an adapter's folder has none, nor has a run's."""
    return gguf_file(folder) is not None or (folder / CONFIG).is_file()


def config_values(folder: Path) -> tuple[dict[str, Any], str]:
    """The contents of `config.json`, and the name of the file that they are from, for messages.

    Raises UserError for a folder that has none, and for a file that cannot be read.
    """
    if (file := gguf_file(folder)) is not None:
        return gguf_config(file), str(file)
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder}: no {CONFIG}; give a model folder in Hugging Face layout, or a GGUF file")
    return read_json(folder / CONFIG), str(folder / CONFIG)


def positions_limit() -> int | None:
    """The longest text according to the environment; None: as a model's folder says. Raises UserError."""
    text = os.environ.get(MAX_POSITIONS, "")
    if text and not (text.isdecimal() and 0 < int(text) < 2**31):
        raise UserError(f"--max-positions ({MAX_POSITIONS}) is {text:.40}; it must be a whole number of at least 1")
    return int(text) if text else None
