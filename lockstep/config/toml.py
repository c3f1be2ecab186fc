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
from lockstep.config.other_names import LOCKSTEP_NAMES
from lockstep.config.runs import PretrainConfig, RLConfig
from lockstep.errors import UserError, closest

Config = TypeVar("Config", PretrainConfig, RLConfig)
CONFIG = "config.toml"
"""The file of a run's settings, in its folder."""
START_SETTINGS = ("output", "resume", "overwrite", "dry_run")
"""Settings that a resumed run does not read from its config.toml."""
COMMAND_SETTINGS = {"environment": "rl", "centering": "reward-model", "beta": "dpo", "epochs": "sft"}
"""A run's command, by the first of these settings that it has; runs of pretrain have none of them."""
MAX_BYTES, MAX_ALIASES = 2**16, 10
"""Limits of a settings file; nested YAML aliases could expand to an arbitrary size."""


def to_toml(config: PretrainConfig | RLConfig) -> str:
    """The resolved configuration as TOML: plain fields first, then a table for each nested one.

    None is omitted, since TOML has no null.
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
        # A JSON string is a TOML basic string, except for this one character.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def from_toml(path: str | Path, base: Config) -> Config:
    """`base` overridden by the values of a TOML file, or of a YAML file if named so (`.yaml`, `.yml`).

    If the file names another algorithm, the algorithm's settings in `base` are reset. Raises UserError for a missing or
    malformed file and for keys that `base` does not have.
    """
    merged = _merge(base, values := _values(path), str(path))
    if isinstance(merged, RLConfig) and isinstance(base, RLConfig):
        merged = with_algorithm(merged, base, values)
    if problems := list(bound_problems(merged)):
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    return merged


def _values(path: str | Path) -> dict[Any, Any]:
    """The contents of a settings file. Raises UserError if it is missing or malformed."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError(f"larger than {MAX_BYTES} bytes")
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
        if sum(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)) > MAX_ALIASES:
            raise ValueError(f"more than {MAX_ALIASES} aliases")
        _refuse_duplicate_keys(yaml.compose(text, yaml.SafeLoader))
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, TypeError) as error:
        # YAML's errors, and Python's for values that cannot be keys or do not fit their tags.
        raise ValueError(" ".join(f"{type(error).__name__}: {error}".split())) from error
    if not isinstance(values, dict | None):
        raise ValueError(f"a {type(values).__name__}, not named settings")
    return values or {}


def _refuse_duplicate_keys(node: Any) -> None:
    """Raises ValueError for a mapping in which a key occurs twice: YAML would silently use the last value."""
    if getattr(node, "id", "") == "mapping":
        names = [str(key.value) for key, _ in node.value]
        if duplicates := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{duplicates[0]} is given twice")
        for _, value in node.value:
            _refuse_duplicate_keys(value)


def recorded_run(output: str | Path, base: Config) -> Config | None:
    """`base` with the settings of the run in the folder `output`; None if there is no run.

    START_SETTINGS are those of `base`. dtype and arithmetic are "auto", which in a resumed run means the recorded ones.
    Raises UserError for settings that cannot be read, or that belong to another command.
    """
    path = Path(output) / CONFIG
    if not path.is_file():
        return None
    start_settings = {name: getattr(base, name) for name in START_SETTINGS if hasattr(base, name)}
    values = _values(path)
    if not values:
        raise UserError(f"{path}: is empty, but a run has settings; put the config.toml of its newest checkpoint there")
    refuse_other_command(output, values, base)
    return dataclasses.replace(_merge(base, values, str(path)), **start_settings, dtype="auto", arithmetic="auto")


def refuse_other_command(output: str | Path, recorded: Collection[str], config: PretrainConfig | RLConfig) -> None:
    """Raises UserError if the run in `output`, which has settings named `recorded`, belongs to another command."""
    before, now = _command(recorded), _command([f.name for f in dataclasses.fields(config)])
    if "output" in recorded and before != now:
        raise UserError(
            f"{output}: is a run of lockstep {before}, which lockstep {now} cannot resume; continue it with "
            f"lockstep {before} --resume --output {output}, or give another --output"
        )


def _command(settings: Collection[str]) -> str:
    """The command that has the settings with these names."""
    return next((command for name, command in COMMAND_SETTINGS.items() if name in settings), "pretrain")


def _merge(config: Any, values: dict[Any, Any], where: str, root: Any = None) -> Any:
    names = {f.name for f in dataclasses.fields(config)}
    for key in values:
        if key not in names:
            hint = _other_name_hint(str(key), root or config) or closest(str(key), names)
            raise UserError(f'{where}: unknown key "{key}".{hint}')
        table = dataclasses.is_dataclass(getattr(config, key))
        if table != isinstance(values[key], dict):
            expected = "a table of settings" if table else "a value, not a table of settings"
            raise UserError(f'{where}: "{key}" must be {expected}; see --help')
        if any(isinstance(number, int) and abs(number) >= 2**63 for number in _plain(values[key])):
            raise UserError(f'{where}: "{key}" contains a number of more than 64 bits')
        if isinstance(values[key], list) and any(isinstance(value, list | dict) for value in values[key]):
            raise UserError(f'{where}: "{key}" must be a list of plain values, without lists or tables in it')
    merged = copy.copy(config)
    for key, value in values.items():
        before = getattr(config, key)
        table = isinstance(value, dict)
        new = _merge(before, value, f"{where} [{key}]", root or config) if table else _converted(value, before)
        setattr(merged, key, new)
    return merged


def _other_name_hint(name: str, root: Any) -> str:
    """A hint if other trainers or earlier versions use this name for a setting; else empty."""
    settings = []
    for other in LOCKSTEP_NAMES.get(name.rpartition(".")[2].replace("_", "-"), ()):
        setting = other.partition(" ")[0].replace("-", "_")
        with suppress(AttributeError):
            attrgetter(setting)(root)
            settings.append(setting)
    return " In Lockstep it is " + " or ".join(settings) if settings else ""


def _plain(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _converted(value: Any, before: Any) -> Any:
    if isinstance(before, float | None) and isinstance(value, str):
        try:
            return float(value)  # YAML reads 1e-5, without a point, as text
        except ValueError:
            return value
    return tuple(value) if isinstance(value, list) else value
