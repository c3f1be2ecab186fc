"""Folders whose configuration ties the output head to the embedding, but whose files have both.

As in transformers, the head is used if its values differ. Such folders result from merging adapters into the head, and
from extending vocabularies.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from lockstep.model.folder import FLOATS, INDEX, SINGLE, open_tensors, tensor_files
from lockstep.model.stored import EMBEDDING, HEAD

ELEMENTS = 2**24
"""Elements compared at a time."""

log = logging.getLogger("lockstep")


def has_untied_head(folder: Path) -> bool:
    """Whether the folder has a head whose values are not the embedding's; if so, warns once per process."""
    if not (folder / SINGLE).is_file() and not (folder / INDEX).is_file():
        return False  # for callers that only read the configuration
    files = tensor_files(folder)
    if HEAD not in files or EMBEDDING not in files:
        return False
    return _differ(files[EMBEDDING], files[HEAD], *(files[name].stat().st_mtime_ns for name in (EMBEDDING, HEAD)))


@lru_cache(maxsize=64)
def _differ(embedding_file: Path, head_file: Path, *written: int) -> bool:
    """written: modification times of the files, so that the cache notices changes."""
    embedding, head = open_tensors(embedding_file).get_slice(EMBEDDING), open_tensors(head_file).get_slice(HEAD)
    if _are_equal(embedding, head):
        return False
    log.warning(
        "%s: config.json says tie_word_embeddings, but %s differs from the embedding and is used; write "
        '"tie_word_embeddings": false there to silence this',
        head_file.parent,
        HEAD,
    )
    return True


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two stored tensors have the same values, in any dtypes."""
    shape, dtypes = one.get_shape(), {FLOATS.get(each.get_dtype()) for each in (one, other)}
    if shape != other.get_shape() or len(shape) != 2 or None in dtypes:
        return False
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    rows = max(1, ELEMENTS // max(1, shape[1]))
    return all(
        torch.equal(one[start : start + rows].to(wide), other[start : start + rows].to(wide))
        for start in range(0, shape[0], rows)
    )
