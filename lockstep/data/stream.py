"""Documents that are streamed during the run, shuffled one window at a time."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from queue import Queue
from typing import Any

from lockstep.data.corpus import Share, TokenizedCorpus, collect, unshared
from lockstep.data.encode import Encoder, token_dtype
from lockstep.data.token_folder import Source
from lockstep.data.workers import encode_all
from lockstep.errors import UserError


class StreamedDocuments:
    """Windows of `size` documents of a stream; the next one is read and tokenized while this one is used.

    Window k holds the documents from number k · size on, without empty ones, so a run resumes by skipping to there.
    The process that `share` chooses reads; all processes of a run request the same windows in the same order.
    """

    def __init__(self, source: Source, encoder: Encoder, size: int, workers: int, share: Share = unshared):
        self.source, self.encoder, self.size, self.workers = source, encoder, size, workers
        self._share = share
        self._reader: _Reader | None = None
        self._number = -1
        self._current: TokenizedCorpus | None = None

    def window(self, index: int) -> TokenizedCorpus | None:
        """The documents of a window; None after the last. Raises UserError for bad data."""
        if index != self._number:
            self._current = self._share(lambda: self._read(index))
            self._number = index
        return self._current

    def _read(self, index: int) -> TokenizedCorpus | None:
        if self._reader is None or index != self._number + 1:
            if self._reader is not None:
                self._reader.stop()
            self._reader = _Reader(self, index)
        return self._reader.next()

    def fingerprint(self) -> dict[str, Any]:
        return {"data": self.source.data, "shuffle_window": self.size}


class _Reader(threading.Thread):
    """Reads windows from number `first` on, one ahead of those requested."""

    def __init__(self, documents: StreamedDocuments, first: int):
        super().__init__(daemon=True, name="windows")
        self._documents, self._first = documents, first
        self._ready: Queue[TokenizedCorpus | BaseException | None] = Queue(maxsize=1)
        self._stopped = False
        self.start()

    def next(self) -> TokenizedCorpus | None:
        window = self._ready.get()
        if isinstance(window, BaseException):
            raise window
        return window

    def stop(self) -> None:
        self._stopped = True
        if not self._ready.empty():
            self._ready.get()

    def run(self) -> None:
        try:
            for window in self._windows():
                self._ready.put(window)
                if self._stopped:
                    return
            self._ready.put(None)
        except Exception as error:
            self._ready.put(error if isinstance(error, UserError) else RuntimeError(f"reading failed: {error!r}"))

    def _windows(self) -> Iterator[TokenizedCorpus]:
        own = self._documents
        source, kind = own.source, token_dtype(own.encoder.tokenizer)
        encoded = encode_all(source.read(self._first * own.size), own.encoder, own.workers)
        while window := list(itertools.islice(encoded, own.size)):
            yield collect(window, lambda: source.tally, kind, source.skip_bad_lines)
