"""Parquet files: the same values as pyarrow reads, of the columns asked for, and no few bytes become gigabytes."""

import datetime
import random
import tracemalloc

import pyarrow as pa
import pytest
from pyarrow import parquet

from lockstep.data import records
from lockstep.data.records import Tally, read_records
from lockstep.errors import UserError

TEXT = "x" * 4_000_000
COLUMNS = ["messages", "prompt", "meta", "notes"]
SCHEMA = pa.schema(
    [
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.large_string())]))),
        ("prompt", pa.string()),
        ("meta", pa.map_(pa.string(), pa.list_(pa.string()))),
        ("notes", pa.list_(pa.string(), 2)),
    ]
)


def _rows(count):
    draw = random.Random(0)

    def text():
        return None if draw.random() < 0.2 else draw.choice("aé🙂") * draw.randrange(4)

    def some(make):
        return None if draw.random() < 0.2 else [make() for _ in range(draw.randrange(3))]

    return [
        {
            "messages": some(lambda: {"role": draw.choice(["user", "assistant"]), "content": text()}),
            "prompt": text(),
            "meta": some(lambda: (str(draw.random()), some(text))),
            "notes": [text(), text()],
        }
        for _ in range(count)
    ]


def _write(path, rows, **options):
    parquet.write_table(pa.Table.from_pylist(rows, SCHEMA), path, **options)
    return path


def _read(path, keys=COLUMNS, skip_bad_lines=False, tally=None):
    return [values for _, values in read_records(path, skip_bad_lines, tally or Tally(), keys)]


@pytest.mark.parametrize(
    "options",
    [
        {"row_group_size": 70},
        {"data_page_version": "2.0", "compression": "zstd", "data_page_size": 100},
        {"use_dictionary": False, "store_schema": False},
    ],
)
def test_rows_are_those_that_were_written_however_that_was(tmp_path, options):
    rows = _rows(200)
    path = _write(tmp_path / "a.parquet", rows, **options)
    assert _read(path) == [_without_nulls_in_objects(row) for row in rows]


def _without_nulls_in_objects(row):
    """A struct has the keys of all rows' objects, and null for those that a row's own object lacks."""

    def present(value):
        if isinstance(value, list):
            return [present(item) for item in value]
        return {k: present(v) for k, v in value.items() if v is not None} if isinstance(value, dict) else value

    return {name: present(value) for name, value in row.items()}


def test_only_the_columns_asked_for_are_read(tmp_path):
    bomb = pa.array([[0] * 2**20], pa.list_(pa.int8()))
    table = pa.table({"mask": bomb, "text": ["a text"], "text.more": ["another"], "also": [{"text": "no"}]})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert _read(tmp_path / "a.parquet", ["text"]) == [
        {"mask": None, "text": "a text", "text.more": None, "also": None}
    ]
    parquet.write_table(table[:0], tmp_path / "none.parquet")
    assert _read(tmp_path / "none.parquet") == []


def test_values_that_json_does_not_know_become_their_text(tmp_path):
    dates = [datetime.date(2026, 1, 2), None]
    times = pa.array([datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), None], pa.timestamp("us", "UTC"))
    parquet.write_table(pa.table({"day": dates, "time": times}), tmp_path / "a.parquet")
    first, last = _read(tmp_path / "a.parquet", ["day", "time"])
    assert first == {"day": "2026-01-02", "time": "2026-01-02 00:00:00+00:00"} and last == {"day": None, "time": None}


def _shared(values, *lists):
    """A column whose values are one text that the file has once, in lists that begin at `lists`."""
    once = pa.DictionaryArray.from_arrays(pa.array([0] * values, pa.int8()), pa.array([TEXT]))
    if not lists:
        return once
    message = pa.StructArray.from_arrays([once], names=["content"])
    return pa.ListArray.from_arrays(pa.array(lists, pa.int32()), message)


@pytest.mark.slow
@pytest.mark.parametrize("lists", [(), range(0, 513, 8), (0, 1, 99, 100)])
def test_a_file_that_repeats_one_text_for_gigabytes_is_refused_and_a_row_that_does_is_a_bad_line(tmp_path, lists):
    path, one_row = tmp_path / "bomb.parquet", len(lists) == 4
    table = pa.table({"messages" if lists else "text": _shared(100 if one_row else 512, *lists)})
    parquet.write_table(table, path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 10_000
    message = "(expands more than 200 times|cannot be read as Parquet .reading it needs too much memory)"
    tracemalloc.start()
    with pytest.raises(UserError, match=rf"bomb\.parquet: ({message}|row 2: longer than 268435456 bytes)"):
        for _ in read_records(path, False, Tally(), ["text", "messages"]):
            pass
    assert tracemalloc.get_traced_memory()[1] < 40 * len(TEXT), "of the 2 GB of all of them"
    tracemalloc.stop()
    if one_row:
        assert len(_read(path, ["messages"], skip_bad_lines=True, tally=(tally := Tally()))) == 2
        assert tally.skipped_lines == 1


def test_a_file_that_repeats_a_value_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "UNPACKED_FREELY", 2**20)
    zeros = pa.array([[b"\0" * 200] * 9_973], pa.list_(pa.binary(200)))
    parquet.write_table(pa.table({"x": zeros}), tmp_path / "zeros.parquet")
    with pytest.raises(UserError, match=r"zeros\.parquet: expands more than 200 times"):
        _read(tmp_path / "zeros.parquet", ["x"])


def test_damaged_files_are_named_or_read_and_nothing_else_happens(tmp_path):
    draw = random.Random(1)
    table = pa.table({"messages": [row["messages"] for row in _rows(20)]})
    parquet.write_table(table, tmp_path / "whole.parquet", row_group_size=12, store_schema=False)
    whole = (tmp_path / "whole.parquet").read_bytes()
    end = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    refused = 0
    for _ in range(25):
        damaged = bytearray(whole)
        place = draw.choice([draw.randrange(4, end), draw.randrange(end, len(whole)), draw.randrange(len(whole) - 8)])
        damaged[place] = draw.choice([0, 255, damaged[place] ^ 1 << draw.randrange(8)])
        (tmp_path / "a.parquet").write_bytes(damaged)
        try:
            _read(tmp_path / "a.parquet", skip_bad_lines=True)
        except UserError as error:
            assert "a.parquet: cannot be read as Parquet" in str(error) or "expands" in str(error)
            refused += 1
    assert 5 < refused < 25


def test_a_page_that_its_checksum_does_not_fit_is_refused(tmp_path):
    table, file = pa.table({"text": [f"text {number}" for number in range(20)]}), tmp_path / "a.parquet"
    parquet.write_table(table, file, compression="none", use_dictionary=False, write_page_checksum=True)
    assert len(_read(file)) == 20
    file.write_bytes(file.read_bytes().replace(b"text 7", b"text 9"))
    with pytest.raises(UserError, match=r"a\.parquet: cannot be read as Parquet"):
        _read(file)
