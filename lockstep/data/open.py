"""Opens a run's data sources as a stream of rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.cache import cache_folder
from lockstep.config import DataConfig
from lockstep.data.corpus import RunOnce, TokenizedCorpus, collect, in_this_process
from lockstep.data.encode import Encoder, token_dtype
from lockstep.data.held_out import SplitPart
from lockstep.data.loader import RowStream
from lockstep.data.mixture import MixedRows
from lockstep.data.rows import Documents, Rows
from lockstep.data.stream import StreamedDocuments
from lockstep.data.token_folder import Source, cached, open_token_folder
from lockstep.data.workers import encode_all
from lockstep.errors import UserError

DataSource = Source | Path | TokenizedCorpus | SplitPart
"""A source of documents, the path of a token folder, a corpus, or a part of one of these."""
IN_MEMORY = 2**28
"""Maximum bytes of files that are tokenized in memory if no cache is configured."""
ALONE = 2**23
"""Bytes of files up to which starting worker processes takes longer than it saves."""


def open_documents(
    source: DataSource, encoder: Encoder, settings: DataConfig, share: RunOnce = in_this_process
) -> Documents:
    """Tokenized documents: token folders are mapped, streams tokenized while they are read, files beforehand.

    `share` distributes what is tokenized in memory. Raises UserError for bad data.
    """
    if isinstance(source, SplitPart):
        return source.split.part(source.held_out, lambda whole: open_documents(whole, encoder, settings, share))
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
