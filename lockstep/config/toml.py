"""A run's configuration as TOML, and back."""

from __future__ import annotations

import copy
import dataclasses
import json
import tomllib
from collections.abc import Collection
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from lockstep.config.algorithm import with_algorithm
from lockstep.config.bounds import bound_problems
from lockstep.config.other_names import HERE
from lockstep.config.runs import PretrainConfig, RLConfig
from lockstep.errors import UserError, closest

Config = TypeVar("Config", PretrainConfig, RLConfig)
CONFIG = "config.toml"
"""The file of a run's settings, in its folder."""
OF_A_START = ("output", "resume", "overwrite", "dry_run")
"""Settings that a resumed run does not take from its file."""
OF_A_COMMAND = {"environment": "rl", "centering": "reward-model", "beta": "dpo", "epochs": "sft"}
"""The first of these settings that a run has tells its command; runs of pretrain have none of them."""
MOST_BYTES, MOST_ALIASES = 2**16, 10
"""Of a settings file. Aliases of aliases, when merged, would multiply what they stand for."""


def to_toml(config: PretrainConfig | RLConfig) -> str:
    """The resolved configuration as TOML: plain fields first, then a table for each nested one.

    None is left out, since TOML cannot express it.
    """
    plain, tables = [], []
    for name, value in dataclasses.asdict(config).items():
        if value is None:
            continue
        if isinstance(value, dict):
            tables += [f"\n[{name}]"] + [f"{k} = {toml_value(v)}" for k, v in value.items()]
        else:
            plain.append(f"{name} = {toml_value(value)}")
    return "\n".join(plain + tables) + "\n"


def toml_value(value: Any) -> str:
    """A setting's value as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(toml_value(v) for v in value)}]"
    if isinstance(value, str):
        # A JSON string is a TOML basic string, but for one character.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def from_toml(path: str | Path, base: Config) -> Config:
    """`base` overridden by the values of a TOML file, or of a YAML file if named so (`.yaml`, `.yml`).

    A file that names another algorithm unsets the settings of `base`'s. Raises UserError for a missing or malformed
    file and for keys that `base` does not have.
    """
    merged = _merge(base, values := _values(path), str(path))
    if isinstance(merged, RLConfig) and isinstance(base, RLConfig):
        merged = with_algorithm(merged, base, values)
    if problems := list(bound_problems(merged)):
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    return merged


def _values(path: str | Path) -> dict[Any, Any]:
    """The contents of a settings file. Raises UserError for one that is missing or malformed."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ValueError(f"larger than {MOST_BYTES} bytes")
        text = content.decode()
        values = _yaml(text) if Path(path).suffix in (".yaml", ".yml") else tomllib.loads(text)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give the name of a TOML or YAML file") from error
    except (ValueError, RecursionError) as error:  # from either format, or for a file that is not text at all
        kind = "YAML" if Path(path).suffix in (".yaml", ".yml") else "TOML"
        line = "key: value" if kind == "YAML" else "key = value"
        raise UserError(f"{path}: cannot be read as {kind} ({error}); write `{line}` lines") from error
    return values


def _yaml(text: str) -> dict[Any, Any]:
    import yaml

    try:
        if sum(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)) > MOST_ALIASES:
            raise ValueError(f"more than {MOST_ALIASES} aliases")
        _refuse_names_given_twice(yaml.compose(text, yaml.SafeLoader))
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, TypeError) as error:
        # Besides its own errors, those for values that cannot be keys, and for values that do not fit their tags.
        raise ValueError(" ".join(f"{type(error).__name__}: {error}".split())) from error
    if not isinstance(values, dict | None):
        raise ValueError(f"a {type(values).__name__}, not named settings")
    return values or {}


def _refuse_names_given_twice(node: Any) -> None:
    """node: of YAML, which would use the last of two values; TOML refuses both."""
    if getattr(node, "id", "") == "mapping":
        names = [str(key.value) for key, _ in node.value]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{twice[0]} is given twice")
        for _, value in node.value:
            _refuse_names_given_twice(value)


def recorded_run(output: str | Path, base: Config) -> Config | None:
    """`base` with the settings of the run in the folder `output`; None if there is no run.

    Settings about the folder itself are those of `base`. dtype and arithmetic are "auto", which in a resumed run stands
    for the recorded ones. Raises UserError for settings that cannot be read, or that belong to another command.
    """
    path = Path(output) / CONFIG
    if not path.is_file():
        return None
    of_this_start = {name: getattr(base, name) for name in OF_A_START if hasattr(base, name)}
    values = _values(path)
    if not values:
        raise UserError(f"{path}: is empty, but a run has settings; put the config.toml of its newest checkpoint there")
    refuse_other_command(output, values, base)
    return dataclasses.replace(_merge(base, values, str(path)), **of_this_start, dtype="auto", arithmetic="auto")


def refuse_other_command(output: str | Path, recorded: Collection[str], config: PretrainConfig | RLConfig) -> None:
    """Raises UserError if the run in `output`, whose settings are named `recorded`, is not of `config`'s command."""
    before, now = _command(recorded), _command([f.name for f in dataclasses.fields(config)])
    if "output" in recorded and before != now:
        raise UserError(
            f"{output}: is a run of lockstep {before}, which lockstep {now} cannot resume; continue it with "
            f"lockstep {before} --resume --output {output}, or give another --output"
        )


def _command(settings: Collection[str]) -> str:
    """The command that has settings of these names."""
    return next((command for name, command in OF_A_COMMAND.items() if name in settings), "pretrain")


def _merge(config: Any, values: dict[Any, Any], where: str, root: Any = None) -> Any:
    names = {f.name for f in dataclasses.fields(config)}
    for key in values:
        if key not in names:
            hint = _here(str(key), root or config) or closest(str(key), names)
            raise UserError(f'{where}: unknown key "{key}".{hint}')
        table = dataclasses.is_dataclass(getattr(config, key))
        if table != isinstance(values[key], dict):
            wanted = "a table of settings" if table else "a value, not a table of settings"
            raise UserError(f'{where}: "{key}" must be {wanted}; see --help')
        if any(isinstance(number, int) and abs(number) >= 2**63 for number in _plain(values[key])):
            raise UserError(f'{where}: "{key}" contains a number of more than 64 bits')
        if isinstance(values[key], list) and any(isinstance(value, list | dict) for value in values[key]):
            raise UserError(f'{where}: "{key}" must be a list of plain values, without lists or tables in it')
    merged = copy.copy(config)
    for key, value in values.items():
        before = getattr(config, key)
        table = isinstance(value, dict)
        own = _merge(before, value, f"{where} [{key}]", root or config) if table else _own(value, before)
        setattr(merged, key, own)
    return merged


def _here(name: str, root: Any) -> str:
    """A hint if other trainers use this name for a setting; empty otherwise."""
    found = []
    for other in HERE.get(name.rpartition(".")[2].replace("_", "-"), ()):
        setting = other.partition(" ")[0].replace("-", "_")
        with suppress(AttributeError):
            attrgetter(setting)(root)
            found.append(setting)
    return " In Lockstep it is " + " or ".join(found) if found else ""


def _plain(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _own(value: Any, before: Any) -> Any:
    if isinstance(before, float | None) and isinstance(value, str):
        try:
            return float(value)  # YAML reads 1e-5, without a point, as text
        except ValueError:
            return value
    return tuple(value) if isinstance(value, list) else value
