"""Folders whose configuration ties the output head to the embedding, but whose files have both.

As in transformers, the head is used if its values differ. Such folders result from merging adapters into the head, and
from extending vocabularies.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from pathlib import Path

import torch

from lockstep.model.folder import FLOATS, INDEX, SINGLE
from lockstep.model.stored import EMBEDDING, HEAD
from lockstep.model.stored_tensor import StoredTensor
from lockstep.model.tensors import stored_tensors

ELEMENTS = 2**24
"""Elements compared at a time."""

log = logging.getLogger("lockstep")


def has_untied_head(folder: Path) -> bool:
    """Whether the folder has a head whose values are not the embedding's; if so, warns once per process."""
    if not (folder / SINGLE).is_file() and not (folder / INDEX).is_file():
        return False  # for callers that only read the configuration
    tensors = stored_tensors(folder)
    if HEAD not in tensors or EMBEDDING not in tensors:
        return False
    files = [tensors[name].file for name in (EMBEDDING, HEAD)]
    return _differ(folder, *files, *(file.stat().st_mtime_ns for file in files))


@lru_cache(maxsize=64)
def _differ(folder: Path, *files: Path | int) -> bool:
    """files: those of both tensors, and their modification times, so that the cache notices changes."""
    tensors = stored_tensors(folder)
    embedding, head = tensors[EMBEDDING], tensors[HEAD]
    if are_equal(embedding, head):
        return False
    log.warning(
        "%s: config.json says tie_word_embeddings, but %s differs from the embedding and is used; write "
        '"tie_word_embeddings": false there to silence this',
        head.file.parent,
        HEAD,
    )
    return True


def are_equal(one: StoredTensor, other: StoredTensor) -> bool:
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
