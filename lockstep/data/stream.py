"""Documents streamed during the run, shuffled one window at a time."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from queue import Queue
from typing import Any

from lockstep.data.corpus import RunOnce, TokenizedCorpus, collect, in_this_process
from lockstep.data.encode import Encoder, token_dtype
from lockstep.data.token_folder import Source
from lockstep.data.workers import encode_all
from lockstep.errors import UserError


class StreamedDocuments:
    """Windows of `size` documents of a stream; the next one is read and tokenized while the current one is used.

    Window k contains documents k · size to (k + 1) · size - 1, without empty ones, so a run resumes by skipping there.
    Only the process that `share` runs the call in reads; all processes request the same windows in the same order.
    """

    def __init__(self, source: Source, encoder: Encoder, size: int, workers: int, share: RunOnce = in_this_process):
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
    """Reads windows from number `first` on, one ahead of the current one."""

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
        documents = self._documents
        source, kind = documents.source, token_dtype(documents.encoder.tokenizer)
        encoded = encode_all(source.read(self._first * documents.size), documents.encoder, documents.workers)
        while window := list(itertools.islice(encoded, documents.size)):
            yield collect(window, lambda: source.tally, kind, source.skip_bad_lines)
