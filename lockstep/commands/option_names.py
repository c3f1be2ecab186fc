"""Answers options under the names of other trainers and engines with their names here."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lockstep.config.other_names import LOCKSTEP_NAMES, LOCKSTEP_VALUES, UNSUPPORTED
from lockstep.errors import UserError, closest

PREFIXES = ("train", "training", "optimizer", "parallel", "parallelism", "model", "dataset", "checkpoint")
"""Groups of settings in other tools; the name after the dot is also looked up alone."""
COMMANDS_ELSEWHERE = {
    "evaluate": "eval",
    "kto": "dpo --loss kto",
    "ipo": "dpo --loss ipo",
    "simpo": "dpo --loss simpo",
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


def refuse_other_names(kind: type, arguments: list[str], positional: bool = False) -> None:
    """Raises UserError for an option that the command of `kind` has under another name, for an unknown value of a
    choice, and for a model without `--model`."""
    options = dict(options_of(kind))
    if not positional and "model" in options and arguments and not arguments[0].startswith("-"):
        is_config = "resume" in options and arguments[0].endswith((".toml", ".yaml", ".yml"))
        what = ("file", "config") if is_config else ("model", "model")
        raise UserError(f"{arguments[0]}: settings have names; give the {what[0]} as --{what[1]} {arguments[0]}")
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        option, equals, value = argument.removeprefix("--").partition("=")
        name = option.replace("_", "-")
        if not argument.startswith("--"):
            continue
        if name in options:
            _refuse_value(name, value if equals else following, options[name])
        elif name in UNSUPPORTED:
            raise UserError(f"there is no --{name}: {UNSUPPORTED[name]}")
        else:
            prefix, _, rest = name.partition(".")
            in_group = prefix in PREFIXES and rest
            known = LOCKSTEP_NAMES.get(name) or (LOCKSTEP_NAMES.get(rest, (rest,)) if in_group else ())
            if equivalents := [other for other in known if other.partition(" ")[0] in options]:
                raise UserError(f"there is no --{name}; use " + " or ".join(f"--{other}" for other in equivalents))


def _refuse_value(name: str, value: str, choices: tuple[str, ...]) -> None:
    if choices and value not in ("", "None", *choices) and not value.startswith("-"):
        meant = LOCKSTEP_VALUES.get(value)
        hint = f' Did you mean "{meant}"?' if meant in choices else closest(value, choices)
        raise UserError(f'--{name} "{value}" is not one of {", ".join(filter(None, choices))}.{hint}')


def options_of(kind: Any, prefix: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """The names of all command-line settings, including nested ones, each with the values of a choice."""
    types = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        name = prefix + field.name.replace("_", "-")
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        if dataclasses.is_dataclass(default):
            yield from options_of(type(default), f"{name}.")
        else:
            yield name, _choices(types[field.name])


def _choices(kind: Any) -> tuple[str, ...]:
    """The values of a setting that is a choice or a list of choices."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    return tuple(value for part in get_args(kind) if get_origin(part) is Literal for value in get_args(part))
