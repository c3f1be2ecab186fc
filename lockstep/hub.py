"""Models by their Hugging Face name: downloaded once, into the cache that all tools of the hub share."""

from __future__ import annotations

import re
from pathlib import Path

from lockstep.errors import UserError

NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?")
"""ORGANISATION/MODEL, optionally followed by @ and a branch, tag or commit."""
FAMILY_FILE = re.compile(r"(?P<file>.+?\.py):(?P<name>.+)", re.DOTALL)
"""The file of a family of the user's own, before the name of a model that is read with it."""
DOWNLOADED = ("*.json", "*.safetensors", "*.jinja")
EXCLUDED = ("original/*", "consolidated*", "*/*")
"""Weights in other layouts, and files in subfolders."""


def split_family(name: str | Path) -> tuple[str, str]:
    """The family's file in `FILE.py:NAME`, and the name after it; for any other name an empty one, and the name."""
    match = FAMILY_FILE.fullmatch(str(name))
    return (match["file"], match["name"]) if match else ("", str(name))


def named_path(name: str | Path) -> Path:
    """The path in a model's name, without a family's file before it."""
    return Path(split_family(name)[1])


def with_family_of(name: str, folder: str | Path) -> str:
    """The name of `folder`, with the family's file that `name` begins with, if any."""
    file, _ = split_family(name)
    return f"{file}:{folder}" if file else str(folder)


def is_local(name: str | Path) -> bool:
    """Whether `name` is a folder, or a model that is one file (GGUF)."""
    path = named_path(name)
    return path.is_dir() or (path.suffix == ".gguf" and path.is_file())


def local_folder(name: str | Path) -> Path:
    """`named_path` if it `is_local`; else the folder to which the hub's model of this name was downloaded.

    Environment variables set the hub, its cache and token, and whether it is accessed at all: HF_ENDPOINT, HF_HOME,
    HF_TOKEN, HF_HUB_OFFLINE. Raises UserError if there is neither folder nor model.
    """
    path = named_path(name)
    if is_local(path):
        return path
    match = NAME.fullmatch(str(path))
    if not match or path.is_file():
        why = "is a file" if path.is_file() else "no such folder"
        raise UserError(
            f"{name}: {why}; give a folder in Hugging Face layout, a GGUF file, a run's folder, or a model on the hub "
            "as ORGANISATION/MODEL"
        )
    return _download(match["name"], match["revision"])


def hub_name(folder: Path) -> tuple[str, str] | None:
    """Name and revision of a model, if `folder` is its snapshot in the hub's cache; None for any other folder."""
    stored = re.fullmatch(r"models--([\w.-]+?)--([\w.-]+)", folder.parent.parent.name)
    if stored is None or folder.parent.name != "snapshots":
        return None
    return f"{stored[1]}/{stored[2]}", folder.name


def is_model(name: str) -> bool:
    """Whether `name` is a folder or a GGUF file, or may be a model on the hub."""
    return bool(name) and (is_local(name) or NAME.fullmatch(split_family(name)[1]) is not None)


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    requested = f"{name}@{revision}" if revision else name
    try:
        folder = snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(DOWNLOADED),
            ignore_patterns=list(EXCLUDED),
            library_name="lockstep",
        )
    except GatedRepoError as error:
        why = "the model is gated: accept its terms on the model's page, then run `hf auth login` or set HF_TOKEN"
        raise UserError(f"{requested}: {why}") from error
    except RevisionNotFoundError as error:
        raise UserError(f'{requested}: the model has no revision "{revision}"') from error
    except RepositoryNotFoundError as error:
        why = "there is no folder and no model with this name; for a private one run `hf auth login` or set HF_TOKEN"
        raise UserError(f"{requested}: {why}") from error
    except LocalEntryNotFoundError as error:
        why = "there is no such folder, it was not downloaded before, and the hub cannot be reached"
        raise UserError(f"{requested}: {why} (no connection, or HF_HUB_OFFLINE is set)") from error
    except Exception as error:  # from the HTTP library, which differs between major versions of huggingface_hub
        raise UserError(
            f"{requested}: the download failed ({error}); try again, complete files are not downloaded again"
        ) from error
    return Path(folder)
