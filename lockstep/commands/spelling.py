"""Options under the names that other trainers and engines use, answered with their names here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from lockstep.config.other_names import HERE
from lockstep.errors import UserError

PREFIXES = ("train", "training", "optimizer", "parallel", "parallelism", "model", "dataset", "checkpoint")
"""Groups of settings elsewhere: the name after the point is also looked up without them."""
COMMANDS_ELSEWHERE = {
    "evaluate": "eval",
    "lm-eval": "eval",
    "sample": "generate",
    "grpo": "rl",
    "ppo": "rl",
    "train": "pretrain",
    "finetune": "sft",
    "fine-tune": "sft",
    "export": "convert",
    "tokenize": "data tokenize",
    "plan": "pretrain --dry-run RANKS",
    "env": "doctor",
    "version": "--version",
    "help": "--help",
}


def refuse_other_names(kind: type, arguments: list[str]) -> None:
    """Raises UserError for an option that `kind`'s command has only under another name."""
    own = set(_options(kind))
    for argument in arguments:
        name = argument.removeprefix("--").partition("=")[0].replace("_", "-")
        if not argument.startswith("--") or name in own:
            continue
        prefix, _, rest = name.partition(".")
        known = HERE.get(name) or (HERE.get(rest, (rest,)) if prefix in PREFIXES and rest else ())
        found = [other for other in known if other.partition(" ")[0] in own]
        if found:
            raise UserError(f"there is no --{name}; use " + " or ".join(f"--{other}" for other in found))


def _options(kind: Any, prefix: str = "") -> Iterator[str]:
    """The names of all command-line settings, including nested ones."""
    for field in dataclasses.fields(kind):
        name = prefix + field.name.replace("_", "-")
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        if dataclasses.is_dataclass(default):
            yield from _options(type(default), f"{name}.")
        else:
            yield name
