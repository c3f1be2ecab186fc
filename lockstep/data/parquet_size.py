"""Bounds the memory that reading a Parquet file takes, before it is read: a few bytes may expand to gigabytes.

The metadata (Thrift's compact protocol) is parsed here because pyarrow's metadata classes crash the process if it is
damaged. As in pyarrow, which reads the values, a field of the wrong type counts as missing.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PER_VALUE = 16
"""Bytes of a value while Arrow reads it, apart from its text: the value or the text's index, and list offsets."""
PER_OBJECT = 32
"""Bytes of a value, apart from its text, as a Python object."""
I32, I64, BINARY, LIST, STRUCT = 5, 6, 8, 9, 12
"""Thrift types of fields."""
DATA, DICTIONARY, DATA_V2 = 0, 2, 3
ABOUT = {DATA: (5, STRUCT), DICTIONARY: (7, STRUCT), DATA_V2: (8, STRUCT)}
"""The field of a page's header that describes its values, by the type of page; its field 1 is their number."""
ENCODING = {DATA: (2, I32), DATA_V2: (4, I32)}
BYTE_ARRAY, REPEATED, DELTA_BYTE_ARRAY = 6, 2, 7
LONGEST_END, LONGEST_HEADER = 2**25, 2**22
"""Maximum bytes of a file's footer and of a page's header."""

Fields = dict[tuple[int, int], Any]
"""By field number and type."""


@dataclass(frozen=True)
class Leaf:
    """A leaf of the schema; a column of structs has several."""

    column: str
    is_text: bool
    length: int
    """Bytes of each value of a fixed-length type."""
    in_lists: bool


@dataclass
class Chunk:
    """A leaf's values in one group of rows."""

    leaf: Leaf
    size: int = 0
    """Upper bound on the bytes that reading it takes, without shared texts."""
    largest_page: int = 0
    """Bytes of the largest page."""
    shares: bool = False
    """Whether values share texts or prefixes of texts."""


def chunks_of(path: Path) -> list[list[Chunk]]:
    """The chunks of each row group, one per leaf, in order.

    Sizes come from the page headers, which readers use, not from the footer. Raises ValueError if it is not a Parquet
    file.
    """
    with path.open("rb") as file:
        try:
            file.seek(-8, os.SEEK_END)
            length, mark = int.from_bytes(file.read(4), "little"), file.read(4)
            if mark != b"PAR1" or length > LONGEST_END:
                raise ValueError("it does not end like a Parquet file")
            file.seek(-8 - length, os.SEEK_END)
            about = _struct(io.BytesIO(file.read(length)))
            leaves = list(_leaves(about[2, LIST]))
            return [
                [_chunk(file, leaf, entry[3, STRUCT]) for leaf, entry in zip(leaves, group[1, LIST], strict=True)]
                for group in about[4, LIST]
            ]
        except (ArithmeticError, AttributeError, EOFError, LookupError, RecursionError, TypeError) as error:
            raise ValueError(f"damaged: {type(error).__name__} {error}") from error


def _leaves(elements: list[Fields]) -> Iterator[Leaf]:
    """The leaves of a schema, which lists groups before their children."""
    open_groups: list[tuple[int, str, bool]] = []  # remaining children, the column, whether in lists
    for index, element in enumerate(elements):
        children, kind = element.get((5, I32), 0), element.get((1, I32))
        column, in_lists = "", False
        if index:
            left, column, in_lists = open_groups.pop()
            if left > 1:
                open_groups.append((left - 1, column, in_lists))
            column = column or element[4, BINARY].decode()
            in_lists = in_lists or element.get((3, I32)) == REPEATED
        if (kind is None) != (children > 0):
            raise ValueError("damaged: a field is neither a value nor a group")
        if kind is None:
            open_groups.append((children, column, in_lists))
        else:
            yield Leaf(column, kind == BYTE_ARRAY, element.get((2, I32), 0), in_lists)


def _chunk(file: io.BufferedIOBase, leaf: Leaf, entry: Fields) -> Chunk:
    chunk, seen = Chunk(leaf), 0
    begin, dictionary = entry[9, I64], entry.get((11, I64), 0)
    file.seek(dictionary if 0 < dictionary < begin else begin)
    while seen < entry[5, I64]:
        header = _header(file)
        kind, unpacked, packed = header[1, I32], header[2, I32], header[3, I32]
        about = header[ABOUT[kind]] if kind in ABOUT else {(1, I32): 0}
        values = about[1, I32]
        if not all(0 <= number < 2**31 for number in (unpacked, packed, values)):
            raise ValueError("damaged: a page has impossible sizes")
        chunk.size += values * max(PER_VALUE, leaf.length) + unpacked
        chunk.largest_page = max(chunk.largest_page, unpacked)
        chunk.shares |= kind == DICTIONARY or (kind in ENCODING and about[ENCODING[kind]] == DELTA_BYTE_ARRAY)
        seen += values if kind != DICTIONARY else 0
        file.seek(packed, os.SEEK_CUR)
    return chunk


def _header(file: io.BufferedIOBase) -> Fields:
    """Reads the struct at the file's position."""
    begin = file.tell()
    for length in (2**10, LONGEST_HEADER):
        part = io.BytesIO(file.read(length))
        try:
            fields = _struct(part)
            file.seek(begin + part.tell())
            return fields
        except EOFError:
            file.seek(begin)
    raise EOFError


def _struct(file: io.BufferedIOBase) -> Fields:
    fields: Fields = {}
    number = 0
    while head := _byte(file):
        kind = head & 15
        number = number + (head >> 4) if head >> 4 else _integer(file)
        if (number, kind) in fields:
            raise ValueError("damaged: a field occurs twice")
        # A boolean's value is in its type.
        fields[number, kind] = _value(file, kind) if kind > 2 else kind == 1
    return fields


def _value(file: io.BufferedIOBase, kind: int) -> Any:
    if kind <= 3:
        return _byte(file)
    if kind <= I64:
        return _integer(file)
    if kind == 7:
        return [_byte(file) for _ in range(8)]
    if kind == BINARY:
        length = _varint(file)
        if len(text := file.read(length)) < length:
            raise EOFError
        return text
    if kind <= 10:  # a list or a set
        head = _byte(file)
        return [_value(file, head & 15) for _ in range(_varint(file) if head >> 4 == 15 else head >> 4)]
    if kind == STRUCT:
        return _struct(file)
    raise ValueError(f"damaged: a field of unknown type {kind}")


def _integer(file: io.BufferedIOBase) -> int:
    number = _varint(file)
    return number >> 1 ^ -(number & 1)


def _varint(file: io.BufferedIOBase) -> int:
    number = 0
    for shift in range(0, 64, 7):
        byte = _byte(file)
        number |= (byte & 127) << shift
        if byte < 128:
            return number
    raise ValueError("damaged: a number of more than 64 bits")


def _byte(file: io.BufferedIOBase) -> int:
    if not (byte := file.read(1)):
        raise EOFError
    return byte[0]


def sizes(values: Any) -> np.ndarray:
    """Approximate bytes of each value of an Arrow array as a Python object; a shared text counts for each value."""
    from pyarrow import compute, types

    base = np.full(len(values), PER_OBJECT, dtype=np.int64)
    kind = values.type
    if types.is_dictionary(kind):
        lengths = compute.take(_lengths(values.dictionary), values.indices)
        return base + lengths.fill_null(0).to_numpy(zero_copy_only=False)
    if types.is_struct(kind):
        return base + np.sum([sizes(field) for field in values.flatten()], axis=0)
    if types.is_fixed_size_list(kind):
        items = sizes(values.values).reshape(-1, kind.list_size).sum(axis=1)
        return base + items[values.offset : values.offset + len(values)]
    if types.is_nested(kind):
        # Lists and maps. Items before the first offset belong to an earlier batch.
        ends, offsets = np.append(0, np.cumsum(sizes(values.values))), values.offsets.to_numpy()
        return base + ends[offsets[1:]] - ends[offsets[:-1]]
    texts = types.is_string, types.is_large_string, types.is_string_view, types.is_binary, types.is_large_binary
    if any(is_one(kind) for is_one in texts):
        return base + _lengths(values).fill_null(0).to_numpy(zero_copy_only=False)
    return base


def _lengths(texts: Any) -> Any:
    """Bytes of each text."""
    from pyarrow import compute, large_binary

    return compute.binary_length(texts.cast(large_binary()))
