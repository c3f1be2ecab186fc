"""A manifest with sizes and checksums of a checkpoint's files and of itself, to detect damage."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections import defaultdict
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from lockstep.checkpoint.safetensors_file import bytes_of, open_safetensors, slices
from lockstep.errors import UserError

MANIFEST = "manifest.json"
EDITABLE = {"adapter_config.json": ("base_model_name_or_path", "revision")}
"""Files that users edit when a base has moved: these keys and the file size are not checked."""
CHUNK = 1 << 26
"""Bytes read or written at once."""


@dataclass(frozen=True)
class Piece:
    """A shard slice that one rank wrote, with the CRC-32 of its values in row-major order."""

    file: str
    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    crc32: int


class IncompleteCheckpoint(Exception):
    """A checkpoint is damaged; the message says how."""


def write_manifest(folder: Path, pieces: list[Piece]) -> None:
    """Syncs and lists every file in `folder`: safetensors by header and pieces, others by their contents."""
    files: dict[str, Any] = {}
    by_file: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for piece in pieces:
        values = asdict(piece)
        by_file[values.pop("file")].append(values)
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        files[name] = {"bytes": path.stat().st_size, "crc32": _crc32_of_file(path, name in by_file)}
        if name in by_file:
            files[name]["pieces"] = by_file[name]
    with (folder / MANIFEST).open("wb") as file:
        file.write(_with_checksum(json.dumps(files).encode()))
        file.flush()
        os.fsync(file.fileno())
    for parent in {path.parent for path in folder.rglob("*")}:
        sync_folder(parent)


def sync_folder(folder: Path) -> None:
    """Syncs the directory entries of `folder` to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def listed_files(folder: Path) -> dict[str, dict[str, Any]]:
    """The manifest's entry of each file, by its path in `folder`. Raises IncompleteCheckpoint."""
    try:
        text = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise IncompleteCheckpoint(f"{MANIFEST} is missing") from None
    except OSError as error:
        raise IncompleteCheckpoint(f"{MANIFEST} cannot be read ({error})") from error
    # Verified before anything in it is used.
    files = text[len(_with_checksum(b"")) - 1 : -1]
    if text != _with_checksum(files):
        raise IncompleteCheckpoint(f"{MANIFEST} cannot be read (it does not match its own checksum)")
    listed: dict[str, dict[str, Any]] = json.loads(files)
    for name in listed:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise IncompleteCheckpoint(f"{MANIFEST} lists {name!r}, which is outside the checkpoint")
    return listed


def damage(folder: Path, checksums: bool = True, rank: int = 0, ranks: int = 1, pattern: str = "*") -> str:
    """What is wrong with a checkpoint; empty if nothing. Each of `ranks` callers checks its share of the tensors.

    Without `checksums` only names and sizes are compared, without reading files. Only files whose names match `pattern`
    are checked.
    """
    try:
        files = {name: entry for name, entry in listed_files(folder).items() if fnmatchcase(name, pattern)}
        for name, entry in files.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.name not in EDITABLE and path.stat().st_size != entry["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {entry['bytes']}"
        if not checksums:
            return ""
        for name, entry in files.items():
            if _crc32_of_file(folder / name, "pieces" in entry) != entry["crc32"]:
                return f"{name} does not match its checksum"
        return _damaged_piece(folder, files, rank, ranks)
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (IncompleteCheckpoint, UserError) as error:
        return str(error)
    except Exception as error:  # readers fail in many ways on what is not our checkpoint
        return f"cannot be read ({type(error).__name__}: {error})"


def damage_of_model(folder: Path) -> str:
    """`damage` of the weights only, a model's or an adapter's."""
    return damage(folder, pattern="model*") or damage(folder, pattern="adapter_model*")


def _damaged_piece(folder: Path, files: dict[str, Any], rank: int, ranks: int) -> str:
    pieces = [(name, piece) for name, entry in files.items() for piece in entry.get("pieces", ())]
    opened = {}
    for name, piece in pieces[rank::ranks]:
        if name not in opened:
            opened[name] = open_safetensors(folder / name)
        values = opened[name].get_slice(piece["name"])[slices(piece["offsets"], piece["sizes"])]
        if zlib.crc32(bytes_of(values)) != piece["crc32"]:
            return f"{name}: tensor {piece['name']} does not match its checksum"
    return ""


def _with_checksum(files: bytes) -> bytes:
    """The manifest's text: the list of files, in JSON, with its own SHA-256."""
    return b'{"sha256": "%s", "files": %s}' % (hashlib.sha256(files).hexdigest().encode(), files)


def _crc32_of_file(path: Path, header_only: bool) -> int:
    """CRC-32 of a file, or only of a safetensors file's header, since its tensors have their own checksums."""
    if path.name in EDITABLE:
        checked = {k: v for k, v in json.loads(path.read_bytes()).items() if k not in EDITABLE[path.name]}
        return zlib.crc32(json.dumps(checked, sort_keys=True).encode())
    with path.open("rb") as file:
        left = path.stat().st_size
        if header_only:
            left = min(left, 8 + int.from_bytes(file.read(8), "little"))
            file.seek(0)
        value = 0
        while left > 0 and (block := file.read(min(left, CHUNK))):
            value = zlib.crc32(block, value)
            left -= len(block)
        return value
