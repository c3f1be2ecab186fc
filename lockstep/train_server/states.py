"""Saved states: adapters in peft's layout, with an optimizer's state or without, in the server's folder.

A state is written beside its place, with a manifest of checksums, and then moved there: a killed server leaves whole
states and remains that the next start removes. `tinker://RUN/KIND/NAME` is a state's path.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from lockstep.checkpoint.manifest import MANIFEST, damage, sync_folder, write_manifest
from lockstep.errors import UserError

SCHEME = "tinker://"
KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""What the client calls the states in each of a run's folders."""
RUN = re.compile(r"[A-Za-z0-9-]{1,64}:train:[0-9]{1,9}")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
DESCRIPTION = "state.json"
UNFINISHED, FORMER = ".unfinished-", ".former-"


@dataclass(frozen=True)
class SavedState:
    """What is known of a state without reading its tensors."""

    run: str
    kind: str
    """A key of `KINDS`."""
    name: str
    base_model: str
    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True
    updates: int = 0
    created: float = field(default_factory=time.time)
    expires: float | None = None
    user_metadata: dict[str, str] | None = None
    size_bytes: int = 0

    @property
    def path(self) -> str:
        return f"{SCHEME}{self.run}/{self.kind}/{self.name}"


def parse_path(path: str) -> tuple[str, str, str]:
    """Run, kind and name. Raises UserError for anything that is not a state's path."""
    parts = path.removeprefix(SCHEME).split("/")
    if not path.startswith(SCHEME) or len(parts) != 3:
        raise UserError(
            f"{path[:200]!r} is not the path of a state; it is tinker://RUN/weights/NAME or …/sampler_weights/NAME"
        )
    run, kind, name = parts
    if not RUN.fullmatch(run) or kind not in KINDS or not NAME.fullmatch(name):
        raise UserError(f"{path[:200]!r} is not the path of a state in this server's folder")
    return run, kind, name


class States:
    """The states in a folder."""

    def __init__(self, folder: Path, most_bytes: int):
        """Creates the folder, and removes what a killed server left unfinished."""
        self.folder, self.most_bytes = folder, most_bytes
        folder.mkdir(parents=True, exist_ok=True)
        for left in [*folder.glob(f"*/*/{UNFINISHED}*")]:
            shutil.rmtree(left, ignore_errors=True)
        for former in [*folder.glob(f"*/*/{FORMER}*")]:
            place = former.with_name(former.name.removeprefix(FORMER))
            if place.exists():
                shutil.rmtree(former, ignore_errors=True)
            else:  # killed between two moves
                former.rename(place)
        self._known = {state.path: state for state in self._read()}

    def _read(self) -> Iterator[SavedState]:
        for file in sorted(self.folder.glob(f"*/*/*/{DESCRIPTION}")):
            try:
                state = SavedState(**json.loads(file.read_text()))
            except (OSError, ValueError, TypeError):
                continue
            if self._place(state) == file.parent:
                yield state

    def _place(self, state: SavedState) -> Path:
        return self.folder / state.run.replace(":", "_") / state.kind / state.name

    def all(self) -> list[SavedState]:
        """Those that have not expired, oldest first."""
        for state in [s for s in list(self._known.values()) if s.expires is not None and s.expires <= time.time()]:
            self.delete(state)
        return sorted(list(self._known.values()), key=lambda state: state.created)

    def of_run(self, run: str) -> list[SavedState]:
        return [state for state in self.all() if state.run == run]

    def find(self, path: str) -> tuple[SavedState, Path]:
        """A state and its folder. Raises UserError for a path without one, and for one that is damaged."""
        run, kind, name = parse_path(path)
        state = next((each for each in self.of_run(run) if (each.kind, each.name) == (kind, name)), None)
        if state is None:
            there = ", ".join(each.path for each in self.of_run(run)[-3:]) or "none of this run"
            raise UserError(f"there is no saved state {path}; there are: {there}")
        if problem := damage(self._place(state)):
            raise UserError(f"the saved state {path} is damaged: {problem}; use another one")
        return state, self._place(state)

    def save(self, state: SavedState, write: Callable[[Path], None], overwrite: bool = False) -> SavedState:
        """Saves a state whose files `write` writes into a folder; returns it with its size.

        Raises UserError for a name that is taken, or if there is no room.
        """
        if not NAME.fullmatch(state.name):
            raise UserError(
                f"{state.name[:200]!r} cannot be a state's name: give up to 128 letters, digits, '.', '_' and '-', not "
                "beginning with '.' or '-'"
            )
        place = self._place(state)
        if state.path in self._known and not overwrite:
            raise UserError(f"{state.path} exists; choose another name, or save with overwrite=True")
        used = sum(each.size_bytes for each in self.all() if each.path != state.path)
        unfinished = place.with_name(f"{UNFINISHED}{secrets.token_hex(6)}")
        try:
            unfinished.mkdir(parents=True)
            write(unfinished)
            size = sum(file.stat().st_size for file in unfinished.iterdir())
            if used + size > self.most_bytes:
                raise UserError(
                    f"{state.path} would take {size} bytes, but the server's folder has {self.most_bytes - used} left; "
                    "delete states, or start the server with a larger --max-state-bytes"
                )
            state = replace(state, size_bytes=size)
            (unfinished / DESCRIPTION).write_text(json.dumps(asdict(state), indent=1) + "\n")
            write_manifest(unfinished, [])
            self._move(unfinished, place)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{state.path} cannot be saved ({error}); make room on the server's disk") from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        self._known[state.path] = state
        return state

    @staticmethod
    def _move(unfinished: Path, place: Path) -> None:
        former = place.with_name(f"{FORMER}{place.name}")
        if place.exists():
            shutil.rmtree(former, ignore_errors=True)
            place.rename(former)
        unfinished.rename(place)
        sync_folder(place.parent)
        shutil.rmtree(former, ignore_errors=True)

    def copy(self, path: str, run: str, name: str, expires: float | None) -> SavedState:
        """Raises UserError as `find` and `save` do."""
        state, folder = self.find(path)
        copied = replace(state, run=run, name=name, created=time.time(), expires=expires)
        return self.save(copied, lambda target: _copy_files(folder, target))

    def set_life(self, path: str, expires: float | None) -> None:
        """Raises UserError as `find` and `save` do."""
        state, folder = self.find(path)
        self.save(replace(state, expires=expires), lambda target: _copy_files(folder, target), overwrite=True)

    def delete(self, state: SavedState) -> None:
        place = self._place(state)
        gone = place.with_name(f"{UNFINISHED}{secrets.token_hex(6)}")
        self._known.pop(state.path, None)  # two threads may find that it has expired
        if place.exists():
            place.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


def _copy_files(folder: Path, target: Path) -> None:
    for file in folder.iterdir():
        if file.name not in (DESCRIPTION, MANIFEST):
            shutil.copy(file, target)


def as_checkpoint(state: SavedState) -> dict[str, Any]:
    """A state as the client lists it."""
    return {
        "checkpoint_id": f"{state.kind}/{state.name}",
        "checkpoint_type": KINDS[state.kind],
        "time": timestamp(state.created),
        "tinker_path": state.path,
        "size_bytes": state.size_bytes,
        "public": False,
        "user_metadata": state.user_metadata,
        "expires_at": None if state.expires is None else timestamp(state.expires),
    }


def timestamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
