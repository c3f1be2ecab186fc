"""Data read, or a tokenizer learned, on rank 0 and sent to every rank: a remote stream may differ between readers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from lockstep.data import TokenizedCorpus, Tokenizer, load_tokenizer
from lockstep.parallel import World

ARRAYS = ("tokens", "offsets", "scored", "branches")
"""The arrays of a corpus that are sent."""


def read_once(world: World, read: Callable[[], TokenizedCorpus | None]) -> TokenizedCorpus | None:
    """What `read` returns on rank 0. If it fails there, the other ranks raise UserError with the same message."""
    if world.mesh is None:
        return read()
    corpus: TokenizedCorpus | None = None

    def counts() -> tuple[list[str], dict[str, int]] | None:
        nonlocal corpus
        corpus = read()
        return (
            None if corpus is None else ([name for name in ARRAYS if getattr(corpus, name) is not None], corpus.counts)
        )

    described = world.from_main(counts)
    if described is None:
        return None
    names, corpus_counts = described
    local = [] if corpus is None else [getattr(corpus, name).reshape(-1) for name in names]
    arrays = dict(zip(names, world.arrays_from_main(local)))
    if "branches" in arrays:
        arrays["branches"] = arrays["branches"].reshape(-1, 2)
    return TokenizedCorpus(**arrays, counts=corpus_counts)


def learn_once(world: World, learn: Callable[[], Tokenizer]) -> Tokenizer:
    """The tokenizer that `learn` returns on rank 0, sent as its saved files; errors as in `read_once`."""
    if world.mesh is None:
        return learn()

    def saved() -> dict[str, str]:
        with tempfile.TemporaryDirectory() as folder:
            learn().save(folder)
            return {path.name: path.read_text(encoding="utf-8") for path in Path(folder).iterdir()}

    files = world.from_main(saved)
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        return load_tokenizer(folder)
