"""Opens a run's data sources as a stream of rows: divided for validation, streamed, cached, mixed."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.cache import cache_folder
from lockstep.config import DataConfig
from lockstep.data.corpus import RunOnce, TokenizedCorpus, collect, in_this_process
from lockstep.data.encode import Encoder, token_dtype
from lockstep.data.loader import MixedRows, RowStream
from lockstep.data.rows import Documents, Rows
from lockstep.data.token_folder import Source, cached, open_token_folder
from lockstep.data.workers import encode_all
from lockstep.errors import UserError

IN_MEMORY = 2**28
"""Maximum bytes of files that are tokenized in memory if no cache is configured."""
ALONE = 2**23
"""Bytes of files up to which starting worker processes takes longer than it saves."""


@dataclass(frozen=True)
class SplitPart:
    """The training or the held-out documents of a source, of which `share` are held out for validation."""

    source: Source | Path | TokenizedCorpus
    share: float
    held_out: bool
    opened: list[TokenizedCorpus]
    """The whole corpus, once either part has opened it."""

    def of(self, whole: TokenizedCorpus) -> TokenizedCorpus:
        """This part of the whole corpus; the split depends only on the number of documents and the share."""
        count = len(whole.offsets) - 1
        size = max(1, round(self.share * count))
        if size >= count:
            raise UserError(
                f"{getattr(self.source, 'data', 'the data')}: has {count} document{'s' * (count != 1)}, of which "
                f"validation_share {self.share:g} leaves none to train on; give --validation-data"
            )
        order = np.random.default_rng(count).permutation(count)
        return replace(whole, chosen=np.sort(order[:size] if self.held_out else order[size:]))


DataSource = Source | Path | TokenizedCorpus | SplitPart
"""A source of documents, the path of a token folder, a corpus, or a part of one of these."""


def parse_data(data: str) -> list[tuple[str, float]]:
    """`a.jsonl=0.7,b.parquet=0.3` as sources and their weights; the weight defaults to 1.

    Text without `=WEIGHT` is a single source, even with commas. Raises UserError for a weight that is not positive.
    """
    parts = [part.rpartition("=") for part in data.split(",")]
    if not any(equals and _number(weight) is not None for _, equals, weight in parts):
        return [(data, 1.0)]
    sources = []
    for part, (name, equals, text) in zip(data.split(","), parts):
        weight = _number(text) if equals else None
        source, share = (part, 1.0) if weight is None else (name, weight)
        if not 0 < share < float("inf") or not source.strip():
            raise UserError(f"data {part!r}: write PATH=WEIGHT, with a weight above 0, as in a.jsonl=0.7,b.jsonl=0.3")
        sources.append((source.strip(), share))
    return sources


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def divide(sources: Sequence[tuple[Any, float]], share: float) -> tuple[list[Any], list[Any]]:
    """Splits each of the weighted sources; returns those to train on and those held out."""
    training, held_out = [], []
    for source, weight in sources:
        opened: list[TokenizedCorpus] = []
        training.append((SplitPart(source, share, False, opened), weight))
        held_out.append((SplitPart(source, share, True, opened), weight))
    return training, held_out


class StreamedDocuments:
    """Windows of `size` documents of a stream; the next one is read and tokenized while the current one is used.

    Window k contains documents k · size to (k + 1) · size - 1, without empty ones, so a run resumes by skipping there.
    Only the process that `share` runs the call in reads; all processes request the same windows in the same order.
    """

    def __init__(self, source: Source, encoder: Encoder, size: int, workers: int, share: RunOnce = in_this_process):
        self.source, self.encoder, self.size, self.workers = source, encoder, size, workers
        self._share = share
        self._windows: Iterator[TokenizedCorpus] = iter(())
        self._next: Future[TokenizedCorpus | None] | None = None
        self._number = -1
        self._current: TokenizedCorpus | None = None

    def window(self, index: int) -> TokenizedCorpus | None:
        """The documents of a window; None after the last. Raises UserError for bad data."""
        if index != self._number:
            self._current = self._share(lambda: self._read(index))
            self._number = index
        return self._current

    def _read(self, index: int) -> TokenizedCorpus | None:
        if self._next is None or index != self._number + 1:
            self._windows = self._from(index)
            self._next = _in_background(self._windows)
        window = self._next.result()
        self._next = _in_background(self._windows)
        return window

    def _from(self, index: int) -> Iterator[TokenizedCorpus]:
        source, kind = self.source, token_dtype(self.encoder.tokenizer)
        encoded = encode_all(source.read(index * self.size), self.encoder, self.workers)
        while window := list(itertools.islice(encoded, self.size)):
            yield collect(window, lambda: source.tally, kind, source.skip_bad_lines)

    def fingerprint(self) -> dict[str, Any]:
        return {"data": self.source.data, "shuffle_window": self.size}


def _in_background(windows: Iterator[TokenizedCorpus]) -> Future[TokenizedCorpus | None]:
    """The next window, read in a thread that does not keep the process from ending; None after the last."""
    future: Future[TokenizedCorpus | None] = Future()

    def read() -> None:
        try:
            future.set_result(next(windows, None))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=read, daemon=True, name="windows").start()
    return future


def open_documents(
    source: DataSource, encoder: Encoder, settings: DataConfig, share: RunOnce = in_this_process
) -> Documents:
    """Tokenized documents: token folders are mapped, streams tokenized while they are read, files beforehand.

    `share` distributes what is tokenized in memory. Raises UserError for bad data.
    """
    if isinstance(source, SplitPart):
        if not source.opened:
            whole = open_documents(source.source, encoder, settings, share)
            if not isinstance(whole, TokenizedCorpus):
                raise UserError(
                    f"{getattr(source.source, 'data', '')}: validation_share needs data of known length, but this is "
                    "streamed; give --validation-data"
                )
            source.opened.append(whole)
        return source.of(source.opened[0])
    if isinstance(source, TokenizedCorpus):
        return source
    if isinstance(source, Path):
        return open_token_folder(source, encoder.tokenizer)
    if source.streamed:
        return StreamedDocuments(source, encoder, settings.shuffle_window, settings.workers, share)
    size = sum(path.stat().st_size for path in source.files)
    workers = settings.workers if size > ALONE else 0

    def in_memory() -> TokenizedCorpus | None:
        if settings.cache or size > IN_MEMORY:
            return None
        encoded = encode_all(source.read(), encoder, workers)
        corpus = collect(encoded, lambda: source.tally, token_dtype(encoder.tokenizer), source.skip_bad_lines)
        if len(corpus.offsets) == 1:
            raise source.tally.no_documents_error(source.data)
        return corpus

    # One process decides for all, since hosts may see files of different sizes.
    corpus = share(in_memory)
    if corpus is not None:
        return corpus
    return cached(source, encoder, Path(settings.cache) if settings.cache else cache_folder(), workers)


def open_rows(
    sources: Sequence[tuple[DataSource, float]],
    encoder: Encoder,
    settings: DataConfig,
    sequence_length: int,
    seed: int,
    share: RunOnce = in_this_process,
    kind: type[Rows] = Rows,
) -> RowStream:
    """Rows of one source, or of several mixed by their weights.

    Raises UserError, naming the source, for data without anything to predict.
    """
    streams = []
    for source, _ in sources:
        documents = open_documents(source, encoder, settings, share)
        how = settings.packing, settings.separate_documents, settings.repeat
        try:
            streams.append(kind(documents, sequence_length, seed, *how))
        except UserError as error:
            name = "" if isinstance(source, TokenizedCorpus) else f"{getattr(source, 'data', source)}: "
            if str(error).startswith(name):
                raise
            raise type(error)(f"{name}{error}") from error
    return streams[0] if len(streams) == 1 else MixedRows(streams, [weight for _, weight in sources])
