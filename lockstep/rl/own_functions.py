"""A run's loss and advantages from the user's files: loaded, tried, recorded by digest and kept with the run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config import RLConfig, algorithm_of
from lockstep.config.bounds import function_in_file
from lockstep.errors import UserError, closest
from lockstep.observe.run_folder import FUNCTIONS
from lockstep.parallel import World
from lockstep.python_file import import_file, source_of
from lockstep.rl.algorithms.own import OwnAdvantages, OwnLoss
from lockstep.rl.algorithms.toy_batch import check_advantages, check_loss

SETTINGS = ("loss", "advantage")
"""Those that can name a function: `FILE.py:NAME`."""
FORM = "FILE.py:NAME"
RECORDED = ("file", "function", "sha256")
"""What a run records of a function."""


@dataclass(frozen=True)
class FunctionSource:
    """Where a function came from."""

    setting: str
    """One of SETTINGS."""
    file: str
    name: str
    source: bytes
    """What was imported from the file."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.source).hexdigest()


@dataclass(frozen=True)
class OwnFunctions:
    """The user's functions in a run, and their sources."""

    loss: OwnLoss | None = None
    advantage: OwnAdvantages | None = None
    sources: tuple[FunctionSource, ...] = ()


def load_own_functions(config: RLConfig, world: World) -> OwnFunctions:
    """The functions that `config.loss` and `config.advantage` name, tried on toy batches.

    Raises UserError, on all ranks, for files and functions that cannot be used, and if ranks have other files.
    """
    named = {setting: function_in_file(getattr(config, setting)) for setting in SETTINGS}
    imported = {setting: _imported(setting, *function) for setting, function in named.items() if function}
    sources = tuple(source for _, source in imported.values())
    for source, digests in zip(sources, zip(*world.gather([source.digest for source in sources]))):
        if len(set(digests)) > 1:
            raise UserError(f"{source.file}: differs between the ranks' hosts; copy one version to all of them")
    algorithm, loss, advantage = algorithm_of(config), None, None
    if "loss" in imported:
        loss = OwnLoss(imported["loss"][0])
        check_loss(loss, algorithm, world.device)
    if "advantage" in imported:
        advantage = OwnAdvantages(imported["advantage"][0])
        check_advantages(advantage, algorithm, config.samples_per_prompt, bool(config.teacher))
    return OwnFunctions(loss, advantage, sources)


def _imported(setting: str, file: str, name: str) -> tuple[Any, FunctionSource]:
    module = import_file(Path(file), setting, FORM)
    defined = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    if not hasattr(module, name):
        raise UserError(
            f'{file}: has no function "{name}".{closest(name, defined)} Found: {", ".join(defined) or "none"}; give '
            f"the {setting} as {FORM}"
        )
    if not callable(function := getattr(module, name)):
        raise UserError(f"{file}: {name} is {function!r:.60}, not a function; write `def {name}(inputs)`")
    return function, FunctionSource(setting, file, name, source_of(module))


def record_functions(run: Path, functions: OwnFunctions) -> None:
    """Writes name and digest of each function into the run's folder, and a copy of its file (`loss.py`).

    Raises UserError, naming the file, if the run began with another function in the same place.
    """
    recorded = _recorded(run)
    for source in functions.sources:
        before = recorded.get(source.setting)
        if before and (before["function"], before["sha256"]) != (source.name, source.digest):
            raise UserError(
                f"{source.file}: its {source.name} is not the {source.setting} that the run in {run} began with, which "
                f"the run keeps: continue with --{source.setting} {run / source.setting}.py:{before['function']}, or "
                f"start another run from its weights with --model {run}"
            )
    new = [source for source in functions.sources if source.setting not in recorded]
    for source in new:
        (run / f"{source.setting}.py").write_bytes(source.source)
        recorded[source.setting] = {"file": source.file, "function": source.name, "sha256": source.digest}
    if new:
        partial = run / (FUNCTIONS + ".partial")
        partial.write_text(json.dumps(recorded, indent=1))
        partial.replace(run / FUNCTIONS)


def with_kept_functions(config: RLConfig, run: Path) -> RLConfig:
    """`config` with the copies that the run kept in place of the user's files, which may have changed since.

    Raises UserError if a copy is missing, or is not what the run used.
    """
    recorded, kept = _recorded(run), dict[str, Any]()
    for setting in SETTINGS:
        if not function_in_file(getattr(config, setting)):
            continue
        copy, of_run = run / f"{setting}.py", recorded.get(setting)
        if of_run is None or not copy.is_file() or hashlib.sha256(copy.read_bytes()).hexdigest() != of_run["sha256"]:
            raise UserError(
                f"{copy}: is not the copy of {getattr(config, setting)} that the run kept (its digest is in "
                f"{run / FUNCTIONS}); restore it"
            )
        kept[setting] = f"{copy}:{of_run['function']}"
    return dataclasses.replace(config, **kept)


def _recorded(run: Path) -> dict[str, dict[str, str]]:
    """Each function's record, by setting."""
    file = run / FUNCTIONS
    if not file.is_file():
        return {}
    try:
        recorded = json.loads(file.read_text())
        return {setting: {key: str(each[key]) for key in RECORDED} for setting, each in recorded.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: cannot be read ({error}); restore it, or start another run") from error
