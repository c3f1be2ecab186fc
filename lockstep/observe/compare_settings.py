"""Which settings differ between runs, by their names on the command line."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

from lockstep.config import CONFIG
from lockstep.config.toml import toml_value
from lockstep.errors import one_line
from lockstep.observe.run_folder import START_SETTINGS, flat_settings
from lockstep.observe.text_table import text_table

ABSENT = "-"
"""Shown for a setting that a run does not have, or that is None there."""
LONGEST = 40
"""Characters of a value that are shown."""
SHARED = 12
"""Characters shown before the first difference of values that are longer."""


def read_settings(run: str | Path) -> dict[str, str] | None:
    """A run's settings by name, as TOML writes their values; None if its config.toml is missing or not TOML."""
    try:
        flat = flat_settings(tomllib.loads((Path(run) / CONFIG).read_text()))
    except (OSError, ValueError, RecursionError):
        return None
    return {name.replace("_", "-"): toml_value(value) for name, value in flat.items() if name not in START_SETTINGS}


def different_settings(runs: Sequence[dict[str, str]]) -> dict[str, list[str]]:
    """For each setting that differs, its value in each run."""
    names = dict.fromkeys(name for settings in runs for name in settings)
    values = {name: [settings.get(name, ABSENT) for settings in runs] for name in names}
    return {name: of_runs for name, of_runs in values.items() if len(set(of_runs)) > 1}


def settings_text(runs: Sequence[str]) -> str:
    """The settings that differ as a table, a row per setting and a column per run."""
    settings = {run: read_settings(run) for run in runs}
    known = {run: each for run, each in settings.items() if each is not None}
    missing = [f"settings of {run}: not compared, its {CONFIG} cannot be read" for run in runs if run not in known]
    if len(known) < 2:
        return "\n".join(missing)
    different = different_settings(list(known.values()))
    if not different:
        return "\n".join(["settings that differ: none", *missing])
    rows = [[name, *_shortened(values)] for name, values in different.items()]
    return "\n".join([text_table(["settings that differ", *known], rows), *missing])


def _shortened(values: Sequence[str]) -> list[str]:
    """Long values from shortly before their first difference, so that what is shown differs too."""
    set_values = {value for value in values if value != ABSENT}
    start = 0
    if len(set_values) > 1 and max(map(len, set_values)) > LONGEST:
        letters = zip(*set_values)
        end = min(map(len, set_values))
        start = max(0, next((at for at, of_all in enumerate(letters) if len(set(of_all)) > 1), end) - SHARED)
    return [one_line("…" + value[start:] if start and value != ABSENT else value, LONGEST) for value in values]
