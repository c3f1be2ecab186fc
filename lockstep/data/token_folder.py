"""Tokens on disk: written once, then memory-mapped by every run and every rank.

A folder contains `tokens.bin`, `offsets.bin` (int64), for conversations `scored.bin` (one byte per token) and, if some
of them have several sequences, `branches.bin` (two int64 per branch), the description `tokens.json` and the tokenizer.
It is written under another name and renamed when complete.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol, runtime_checkable

import numpy as np

from lockstep.data.answer_spans import Turns
from lockstep.data.chat import CHATML, carry_template, load_chat_template, with_chatml
from lockstep.data.conversations import ConversationEncoder, ConversationSource
from lockstep.data.corpus import TokenizedCorpus, drain
from lockstep.data.encode import Encoded, Encoder, TextEncoder, token_dtype
from lockstep.data.records import Tally
from lockstep.data.text import TextSource
from lockstep.data.tokenizer import BYTE_FILE, Tokenizer, named_tokenizer, read_text
from lockstep.data.workers import encode_all
from lockstep.errors import UserError
from lockstep.hub import named_path
from lockstep.progress import Progress

DESCRIPTION = "tokens.json"
DTYPES = {"uint16": np.uint16, "uint32": np.uint32}
FORMAT = 2


@runtime_checkable
class Source(Protocol):
    """The source of an encoder's items."""

    data: str
    skip_bad_lines: bool
    tally: Tally
    files: list[Path]
    streamed: bool

    def read(self, skip: int = 0) -> Iterator[Any]: ...
    def describe(self) -> dict[str, Any]:
        """Everything but the files that determines the documents."""
        ...


def is_token_folder(path: str | Path) -> bool:
    """Whether `lockstep data tokenize` wrote this folder."""
    return (Path(path) / DESCRIPTION).is_file()


def open_token_folder(folder: Path, tokenizer: Tokenizer | None = None) -> TokenizedCorpus:
    """The folder's corpus, memory-mapped; if `tokenizer` is given, its tokens are checked as they are read.

    Raises UserError for a folder that is damaged, or whose tokens are not those of `tokenizer`.
    """
    try:
        about = json.loads(read_text(folder / DESCRIPTION))
        tokens, documents = int(about["tokens"]), int(about["documents"])
        # Only known types: with others that NumPy accepts by name, bytes of the file could even be read as pointers.
        kind = np.dtype(DTYPES[about["dtype"]])
        scored, branches, made_by = bool(about["scored"]), int(about["branches"]), about["tokenizer"]
        counts = {str(name): int(count) for name, count in about["counts"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(f"{folder / DESCRIPTION}: cannot be read ({error!r:.200}); tokenize the data again") from error
    if tokenizer is not None and made_by != tokenizer_fingerprint(tokenizer):
        raise UserError(
            f"{folder}: was tokenized with a different tokenizer than the model's; tokenize the data again with "
            "lockstep data tokenize --tokenizer FOLDER"
        )
    files = {"tokens.bin": (kind, tokens), "offsets.bin": (np.dtype(np.int64), documents + 1)}
    if scored:
        files["scored.bin"] = (np.dtype(np.uint8), tokens)
    if branches:
        files["branches.bin"] = (np.dtype(np.int64), 2 * branches)
    arrays = {}
    for name, (dtype, length) in files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else -1
        if size != length * dtype.itemsize:
            raise UserError(
                f"{path}: has {size} bytes instead of {length * dtype.itemsize}; delete {folder} and tokenize again"
            )
        arrays[name] = np.memmap(path, dtype, mode="r", shape=(length,)) if length else np.empty(0, dtype)
    if not _ascending(arrays["offsets.bin"], tokens):
        raise UserError(f"{folder / 'offsets.bin'}: the offsets do not ascend from 0 to {tokens}; tokenize again")
    branch_array = arrays["branches.bin"].reshape(-1, 2) if branches else None
    if branch_array is not None and not _are_branches(branch_array, arrays["offsets.bin"]):
        raise UserError(f"{folder / 'branches.bin'}: these are not branches of its documents; tokenize again")
    vocab_size = None if tokenizer is None else tokenizer.vocab_size
    return TokenizedCorpus(
        arrays["tokens.bin"],
        arrays["offsets.bin"],
        arrays.get("scored.bin"),
        branch_array,
        counts,
        vocab_size,
        where=str(folder),
    )


def _are_branches(branches: np.ndarray, offsets: np.ndarray) -> bool:
    """Whether they ascend, each within a document, and share at most its first sequence."""
    starts, shared = branches.T
    documents = np.searchsorted(offsets, starts, side="right") - 1
    if (starts <= 0).any() or (starts >= offsets[-1]).any() or not (starts[:-1] < starts[1:]).all():
        return False
    _, first = np.unique(documents, return_index=True)
    leads = np.repeat(starts[first], np.diff(first, append=len(starts))) - offsets[documents]
    return bool(((leads > 0) & (shared >= 0) & (shared <= leads)).all())


def _ascending(offsets: np.ndarray, last: int) -> bool:
    """Whether they ascend from 0 to `last`; reads a memory-mapped array in parts."""
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != last:
        return False
    parts = (offsets[start : start + 2**20 + 1] for start in range(0, len(offsets) - 1, 2**20))
    # Compared, since a difference of two offsets may overflow an int64.
    return all((part[:-1] <= part[1:]).all() for part in parts)


def write_token_folder(
    folder: Path, source: Source, encoder: Encoder, workers: int = 0, on_bytes: Callable[[int], None] | None = None
) -> None:
    """Tokenizes a source into a folder, which appears when it is complete; only a few batches are in memory.

    `on_bytes` is called with the bytes of the files read so far. Raises UserError for bad data and for a full disk.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        about = _write(partial, source, encoder, workers, on_bytes)
        encoder.tokenizer.save(partial)
        (partial / DESCRIPTION).write_text(json.dumps(about, indent=1))
        partial.replace(folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); free space or give another folder") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def tokenize_with_progress(folder: Path, source: Source, encoder: Encoder, workers: int) -> None:
    """`write_token_folder` with a progress bar over the files' bytes; a stream fills it at the end."""
    total = sum(path.stat().st_size for path in source.files)
    with Progress("tokenize", total or 1) as bar:
        write_token_folder(folder, source, encoder, workers, lambda read: bar.advance(read - bar.done))
        if bar.done < bar.total:
            bar.advance(bar.total - bar.done)


def _write(
    folder: Path, source: Source, encoder: Encoder, workers: int, on_bytes: Callable[[int], None] | None
) -> dict[str, Any]:
    kind = token_dtype(encoder.tokenizer)
    scored = False
    with (folder / "tokens.bin").open("wb") as tokens, (folder / "scored.bin").open("wb") as masks:

        def keep(part: Encoded) -> None:
            nonlocal scored
            part.tokens.astype(kind, copy=False).tofile(tokens)
            if part.scored is not None:
                scored = True
                part.scored.astype(np.uint8).tofile(masks)
            if on_bytes is not None:
                on_bytes(source.tally.bytes_read)

        encoded = encode_all(source.read(), encoder, workers)
        offsets, branches = drain(encoded, keep, lambda: source.tally, source.skip_bad_lines)
        _flush(tokens)
        _flush(masks)
    if len(offsets) == 1:
        raise source.tally.no_documents_error(source.data)
    if not scored:
        (folder / "scored.bin").unlink()
    offsets.tofile(folder / "offsets.bin")
    if branches is not None:
        branches.tofile(folder / "branches.bin")
    return {
        "format": FORMAT,
        "tokens": int(offsets[-1]),
        "documents": len(offsets) - 1,
        "dtype": np.dtype(kind).name,
        "scored": scored,
        "branches": 0 if branches is None else len(branches),
        "counts": source.tally.counts(),
        "tokenizer": tokenizer_fingerprint(encoder.tokenizer),
        "source": source.data,
        **source.describe(),
        **encoder.describe(),
    }


def cached(source: Source, encoder: Encoder, cache: Path, workers: int) -> TokenizedCorpus:
    """The source's corpus from the cache, tokenized now if it is not there.

    The cache key is a hash of the files (path, size, modification time), the tokenizer and everything else that
    determines the tokens. If several processes need the corpus, one tokenizes and the others wait.
    """
    files = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in source.files]
    how = [source.describe(), source.skip_bad_lines, encoder.describe(), tokenizer_fingerprint(encoder.tokenizer)]
    key = [FORMAT, files, how]
    folder = cache / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    with _lock(cache / f"{folder.name}.lock"):
        if not is_token_folder(folder):
            tokenize_with_progress(folder, source, encoder, workers)
    return open_token_folder(folder, encoder.tokenizer)


@contextmanager
def _lock(path: Path) -> Iterator[IO[str]]:
    # The kernel releases it when the process ends, however that happens.
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise UserError(f"{path.parent}: cannot be written ({error.strerror}); give another --loader.cache") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """Equal for tokenizers that produce the same tokens and the same end of text."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        digest = hashlib.sha256(f"{tokenizer.vocab_size} {tokenizer.eos_id}".encode())
        path = Path(folder) / BYTE_FILE
        digest.update((path if path.is_file() else Path(folder) / "tokenizer.json").read_bytes())
    return digest.hexdigest()[:16]


def _flush(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def tokenize_to_folder(
    data: str,
    output: str,
    tokenizer: str = "byte",
    template: str = "{text}",
    chat: bool = False,
    skip_bad_lines: bool = False,
    workers: int = 4,
    turns: Turns = "apart",
) -> None:
    """`lockstep data tokenize`: writes the folder `output` and prints its contents.

    Raises UserError for bad data or an existing folder.
    """
    folder = Path(output)
    if folder.exists():
        raise UserError(f"{folder}: already exists; delete it or give another --output")
    source: Source
    encoder: Encoder
    if chat:
        source = ConversationSource(data, skip_bad_lines)
        chat_template = load_chat_template(named_path(tokenizer), "" if template == "{text}" else template)
        chat_tokenizer = named_tokenizer(tokenizer, [])
        if template == CHATML:
            chat_tokenizer = with_chatml(chat_tokenizer)
        encoder = ConversationEncoder(chat_tokenizer, chat_template, turns)
        if chat_template is not None and template != "{text}":
            carry_template(encoder.tokenizer, chat_template)
    else:
        source = texts = TextSource(data, template, skip_bad_lines)
        encoder = TextEncoder(named_tokenizer(tokenizer, texts))
    tokenize_with_progress(folder, source, encoder, workers)
    corpus = open_token_folder(folder)
    left_out = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in corpus.counts.items() if count)
    size = sum(path.stat().st_size for path in folder.iterdir()) / 2**20
    print(f"{folder}: {len(corpus.tokens)} tokens in {len(corpus.offsets) - 1} documents, {size:.1f} MiB")
    if left_out:
        print(f"left out: {left_out}")
