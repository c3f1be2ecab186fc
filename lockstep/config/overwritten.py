"""Files that a run would read from the folder that it overwrites."""

from __future__ import annotations

import glob
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.config.runs import PretrainConfig, RLConfig
from lockstep.errors import UserError
from lockstep.hub import split_family

READ = (
    "model", "tokenizer", "teacher", "kl_reference", "reference", "reward_model", "engine.draft_model", "data",
    "validation_data", "template", "environment", "train.schedule_file", "parallel.pipeline_schedule",
)  # fmt: skip
"""Settings that may name files or folders."""
NO_FILES = ("byte", "start", "average")
"""Values of these settings that never name a file, even if there is one of that name."""


def overwritten_problems(config: PretrainConfig | RLConfig) -> Iterator[str]:
    """Settings that name a file in the output folder, which the run empties first."""
    output = Path(config.output).resolve()
    for name in READ:
        value = str(_setting(config, name))
        paths = [path for part in value.split(",") for path in _paths(part)]
        # An adapter is read together with its base.
        paths += [_base(path) for path in paths]
        if (name == "environment" and ".py" not in value) or value in NO_FILES:
            continue
        if any(path.resolve().is_relative_to(output) for path in paths):
            yield f"{name} {value} is in {config.output}, which --overwrite would empty; give another --output"


def _setting(config: Any, name: str) -> Any:
    """The value of a setting by its dotted name; empty if the run has no such setting."""
    for part in name.split("."):
        config = getattr(config, part, "")
    return config


def _paths(text: str) -> list[Path]:
    """The existing files that a setting names: PATH, PATH=WEIGHT, FILE.py:NAME, FILE.py:PATH or a glob."""
    file, named = split_family(text)
    # Not `Path.exists`, which raises for values that cannot be file names, such as a long template.
    names = [name for name in (text, text.rpartition("=")[0], file, named) if name]
    existing = [name for name in names if os.path.exists(name)]
    return [Path(name) for name in existing or itertools.chain(*(glob.iglob(name, recursive=True) for name in names))]


def _base(path: Path) -> Path:
    from lockstep.model.adapter_folder import base_folder

    try:
        return base_folder(path)
    except UserError:  # reported when the run loads it
        return path
