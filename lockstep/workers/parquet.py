"""Reads Parquet files in a worker process: a few bytes may expand to gigabytes, and damaged ones can crash pyarrow."""

from __future__ import annotations

import inspect
import io
import json
import pickle
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pyarrow
from pyarrow import parquet, types

from lockstep.workers.messages import from_json

LONGEST_ROW = 2**28
"""Maximum bytes of a row, pickled."""
BATCH_BYTES, BATCH_ROWS = 2**24, 64
"""Approximate bytes of the rows of a message, and maximum number of rows that are read at once."""

Decode = Callable[[Any], Any]


class Reader:
    """Answers a request of [path, columns or null for all] with the names of all columns, and each empty one after it
    with the next rows, each pickled, or None for one that is too long; with none at the end. All answers are pickled;
    one that is a string says why the file cannot be read."""

    def __init__(self) -> None:
        self._answers: Iterator[list[Any]] = iter(())

    def __call__(self, request: bytes) -> bytes:
        try:
            if request:
                self._answers = _answers(*from_json(request))
            answer: Any = next(self._answers, [])
        except MemoryError:
            answer = "reading it needs too much memory"
        except (OSError, ValueError, LookupError, OverflowError, RecursionError, pyarrow.ArrowException) as error:
            answer = str(error)
        return pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL)


class _Pickler(pickle.Pickler):
    """Values of other than plain types, such as dates, become their text."""

    def reducer_override(self, value: Any) -> Any:
        return NotImplemented if value is str else (str, (str(value),))


def _pickled(values: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(values)
    return buffer.getvalue()


def _answers(path: str, keys: Collection[str] | None) -> Iterator[list[Any]]:
    decode = decoders(path)
    yield list(decode)
    # At least one column: without any, the number of rows is whatever the file claims.
    wanted = list(decode) if keys is None else [name for name in decode if name in keys] or list(decode)[:1]
    with _open(path, extensions=False) as file:  # JSON is decoded below
        for index in range(file.num_row_groups if wanted else 0):
            group = file.metadata.row_group(index)
            rows = BATCH_BYTES * group.num_rows // max(1, group.total_byte_size)
            batches = file.iter_batches(max(1, min(BATCH_ROWS, rows)), row_groups=[index], columns=wanted)
            for batch in batches:
                yield from _packed(batch, decode)


def _packed(batch: Any, decode: dict[str, Decode]) -> Iterator[list[bytes | None]]:
    """The rows of a batch, in lists of about BATCH_BYTES."""
    rows: list[bytes | None] = []
    size = 0
    for row in range(batch.num_rows):
        values = {name: decode[name](column[row].as_py()) for name, column in zip(batch.schema.names, batch.columns)}
        pickled = _pickled(values)
        rows.append(pickled if len(pickled) <= LONGEST_ROW else None)
        size += len(rows[-1] or b"")
        if size >= BATCH_BYTES:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows


def _open(path: str, extensions: bool) -> Any:
    supported = "arrow_extensions_enabled" in inspect.signature(parquet.ParquetFile).parameters
    options = {"arrow_extensions_enabled": extensions} if supported else {}
    # Without a buffer size, it would hold a group's whole columns.
    return parquet.ParquetFile(path, buffer_size=2**20, page_checksum_verification=True, **options)


def decoders(path: str) -> dict[str, Decode]:
    """A decoder for the values of each column, by the column's name.

    Text of Arrow's extension type `arrow.json` is parsed: `datasets` writes objects with different keys as such. A
    struct has the keys of the structs in all rows; those without a value are dropped.
    """
    with _open(path, extensions=True) as file:
        return {field.name: _decoder(field) for field in file.schema_arrow}


def _decoder(field: Any) -> Decode:
    kind = field.type
    name = getattr(kind, "extension_name", "") or (field.metadata or {}).get(b"ARROW:extension:name", b"").decode()
    if name == "arrow.json":
        return lambda value: None if value is None else json.loads(value)
    if types.is_struct(kind):
        inner = {kind.field(index).name: _decoder(kind.field(index)) for index in range(kind.num_fields)}
        return lambda value: None if value is None else _present({k: inner[k](v) for k, v in value.items()})
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        of_item = _decoder(kind.value_field)
        return lambda value: None if value is None else [of_item(item) for item in value]
    return lambda value: value


def _present(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
