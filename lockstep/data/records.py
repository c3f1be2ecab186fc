"""Reads objects from JSON and Parquet files and from Hugging Face `datasets`, each with its location."""

from __future__ import annotations

import gzip
import importlib.util
import json
import math
import re
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.workers import Closed, Worker, WorkerEnded, from_plain, to_json

LONGEST_LINE = 2**28
"""Maximum bytes of a JSONL line; longer documents belong in text files, which are read in parts."""
MOST_VALUES = 2**22
"""Maximum number of each of the characters , : [ and { in a JSONL line, including those in strings: each may start a
value, and many small values take 20 times the memory of their line. A book has a comma about every 80 characters."""
LEAST_LINE = 256
"""Minimum size of a line when a gzip file's expansion is counted: a billion empty lines take minutes, too."""
TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[][{},"]', re.DOTALL)
"""A whole string in JSON, a structural character, or the quote of an unterminated string, at which the search ends, so
that it takes linear time."""
HUB = "hf:"
LARGEST_RATIO, UNPACKED_FREELY = 200, 2**30
"""A gzip or Parquet file may expand by this factor, and always to this many bytes; text compresses 3 to 20 times."""
READER_LIMITS: dict[str, Any] = {"seconds": 60.0, "memory": 3 * 2**30, "max_bytes": 2**31}
"""Of the process that reads a Parquet file: processor time per batch of rows, its memory, and bytes of a batch."""

NO_TEXT = "contains no text: there are no documents in it, or only empty ones; give other data"
LEFT_OUT = {
    "skipped_lines": "malformed and skipped (--skip-bad-lines)",
    "empty_documents": "empty",
    "equal_pairs": "with two identical answers",
    "long_pairs": "longer than a row (give a larger --sequence-length)",
    "long_examples": "longer than a row (give a larger --sequence-length)",
}
"""Descriptions of a `Tally`'s counts."""


@dataclass
class Tally:
    """Counts of one pass over a source."""

    skipped_lines: int = 0
    empty_documents: int = 0
    bytes_read: int = 0
    """Bytes of the files on disk."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Number of examples left out, by reason."""

    def counts(self) -> dict[str, int]:
        """The counts that go into a run's metrics."""
        return {"skipped_lines": self.skipped_lines, "empty_documents": self.empty_documents, **self.left_out}

    def no_documents_error(self, data: str) -> UserError:
        """The error, with the reason, for `data` that has no document to train on."""
        counts = {name: count for name, count in self.counts().items() if count}
        if not counts.keys() - {"empty_documents"}:
            return UserError(f"{data}: {NO_TEXT}")
        why = ", ".join(f"{count} {LEFT_OUT[name]}" for name, count in counts.items())
        return UserError(f"{data}: none of its {sum(counts.values())} examples can be trained on: {why}")


def holds_records(path: Path) -> bool:
    """Whether a file is read as objects; any other file is text.

    A `.json` file is if it contains an array, or an object on its first line, as JSONL does.
    """
    name = path.name.lower()
    if name.endswith((".jsonl", ".jsonl.gz", ".parquet")):
        return True
    return name.endswith(".json") and (_is_array(path) or _begins_with_an_object(path))


def _is_array(path: Path) -> bool:
    """Whether the first non-blank character of a file begins an array."""
    try:
        with path.open("rb") as file:
            return file.read(4096).lstrip().startswith(b"[")
    except OSError:
        return False


def _begins_with_an_object(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            line = next((line for line in iter(lambda: file.readline(LONGEST_LINE), b"") if line.strip()), b"")
    except OSError:
        return False
    return line.lstrip().startswith(b"{") and not _parse(line)[1]


def read_records(
    path: Path, skip_bad_lines: bool, tally: Tally, keys: Collection[str] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(`file:line`, object) of each line of a JSONL file, item of a JSON array, or row of a `.parquet` file.

    From a `.parquet` file only the columns `keys` are read (None: all); the others are None. Raises UserError for
    a file that cannot be read and, unless these are skipped, for a line that is not a JSON object or is longer than
    `LONGEST_LINE`.
    """
    if path.suffix.lower() == ".parquet":
        yield from _parquet(path, skip_bad_lines, tally, keys)
    elif path.suffix.lower() == ".json" and _is_array(path):
        yield from _array(path, skip_bad_lines, tally)
    else:
        for number, values in read_jsonl(path, skip_bad_lines, tally):
            yield f"{path}:{number}", values


def _array(path: Path, skip_bad_lines: bool, tally: Tally) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, item in enumerate(_items(path), start=1):
        where = f"{path}: item {number}"
        if (values := _good(where, *_parse(item), skip_bad_lines, tally)) is not None:
            yield where, values
    tally.bytes_read += path.stat().st_size


def _items(path: Path) -> Iterator[bytes]:
    """Each item's text of an array of objects, which is not parsed as a whole.

    Raises UserError for a file that is too large or an array that is not closed.
    """
    try:
        if path.stat().st_size > LONGEST_LINE:
            raise UserError(
                f"{path}: has {path.stat().st_size} bytes; an array can have at most {LONGEST_LINE}; "
                "write its items to a .jsonl file, one per line"
            )
        text = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); fix it or leave it out") from error
    depth, start, commas = 0, 0, 0
    for match in TOKEN.finditer(text):
        token = match[0]
        if token in (b"[", b"{"):
            depth += 1
            start = match.end() if depth == 1 else start
        elif token in (b"]", b"}"):
            depth -= 1
        if (token == b"," and depth == 1) or (depth == 0 and token == b"]"):
            if commas or depth or text[start : match.start()].strip():
                yield text[start : match.start()]
            start, commas = match.end(), commas + 1
        if depth == 0 or token == b'"':
            break
    if depth or text[start:].strip():
        problem = "text follows the array" if not depth else "the array is not closed"
        raise UserError(f"{path}: {problem}; is it complete? Write it again, or give a .jsonl file")


def _good(
    where: str, values: dict[str, Any], problem: str, skip_bad_lines: bool, tally: Tally
) -> dict[str, Any] | None:
    """The values, unless there is a problem: None, and counted, if bad lines are skipped, else UserError."""
    if not problem:
        return values
    if not skip_bad_lines:
        raise UserError(f"{where}: not a JSON object ({problem}); fix it or use --skip-bad-lines")
    tally.skipped_lines += 1
    return None


def read_jsonl(
    path: Path, skip_bad_lines: bool = False, tally: Tally | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of each line that is not blank; `.gz` is decompressed.

    Raises UserError with file and line for a line that is not a JSON object, unless these are skipped; `tally` counts
    them. Also raises UserError for a gzip file that is damaged or expands more than text does.
    """
    tally = tally or Tally()
    compressed = path.suffix.lower() == ".gz"
    unpacked = 0
    try:
        limit = max(UNPACKED_FREELY, LARGEST_RATIO * path.stat().st_size) if compressed else math.inf
        with gzip.open(path, "rb") if compressed else path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), start=1):
                tally.bytes_read += 0 if compressed else len(line)
                unpacked += max(len(line), LEAST_LINE)
                if unpacked > limit:
                    raise _bomb(path)
                if not line.strip():
                    continue
                values: dict[str, Any]
                if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                    values, problem = {}, f"longer than {LONGEST_LINE} bytes"
                    while skip_bad_lines and (rest := file.readline(LONGEST_LINE)) and unpacked <= limit:
                        unpacked += len(rest)
                        if rest.endswith(b"\n"):
                            break
                else:
                    values, problem = _parse(line)
                if (good := _good(f"{path}:{number}", values, problem, skip_bad_lines, tally)) is not None:
                    yield number, good
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: cannot be read ({reason}); fix it or leave it out") from error
    tally.bytes_read += path.stat().st_size if compressed else 0


JSON_KINDS: dict[type, str] = {
    list: "a list", str: "a text", int: "a number", float: "a number", bool: "true or false", type(None): "null",
    dict: "an object",
}  # fmt: skip


def json_type(value: Any) -> str:
    """The JSON type of a value, in words."""
    return JSON_KINDS.get(type(value), f"a {type(value).__name__}")


def _parse(line: bytes) -> tuple[dict[str, Any], str]:
    """The line's object, and what is wrong with it, if anything."""
    for character in (b",", b":", b"[", b"{"):
        if line.count(character) > MOST_VALUES:
            return {}, f"has the character {character.decode()} more than {MOST_VALUES} times"
    try:
        values = json.loads(line)
        if not isinstance(values, dict):
            return {}, json_type(values)
        if b"\\ud" in line.lower() or b"\xed" in line:
            # JSON can contain half a surrogate pair, escaped or as bytes, which has no UTF-8: no tokenizer accepts it.
            json.dumps(values, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        return {}, f"byte {error.start} of the line, from 0, is not UTF-8"
    except ValueError as error:
        return {}, str(error)
    except RecursionError:
        return {}, "nested too deeply"
    return values, ""


def _parquet(
    path: Path, skip_bad_lines: bool, tally: Tally, keys: Collection[str] | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    if importlib.util.find_spec("pyarrow") is None:
        raise UserError(f"{path}: pyarrow is not installed; pip install pyarrow, or give .jsonl files")
    try:
        limit, unpacked, number = max(UNPACKED_FREELY, LARGEST_RATIO * path.stat().st_size), 0, 0
        with _parquet_reader() as ask:
            names = ask(to_json([str(path.absolute()), None if keys is None else list(keys)]))
            while rows := ask(b""):
                for row in rows:
                    number += 1
                    unpacked += LONGEST_LINE if row is None else len(row)
                    if unpacked > limit:
                        raise _bomb(path)
                    if row is not None:
                        yield f"{path}: row {number}", dict.fromkeys(names) | from_plain(row)
                    elif skip_bad_lines:
                        tally.skipped_lines += 1
                    else:
                        problem = f"{path}: row {number}: longer than {LONGEST_LINE} bytes"
                        raise UserError(f"{problem}; fix it or use --skip-bad-lines")
        tally.bytes_read += path.stat().st_size
    except (OSError, ValueError, WorkerEnded, Closed) as error:
        raise UserError(f"{path}: cannot be read as Parquet ({error}); fix it or leave it out") from error


_idle_readers: list[Worker] = []
"""Processes that read Parquet files, for the next file."""


@contextmanager
def _parquet_reader() -> Iterator[Callable[[bytes], Any]]:
    """Asks a `Reader` in a worker process. Raises ValueError, or WorkerEnded if the file ended the process."""
    worker = _idle_readers.pop() if _idle_readers else Worker("lockstep.workers.parquet:Reader", **READER_LIMITS)

    def ask(request: bytes) -> Any:
        answer = from_plain(worker.ask(request))
        if isinstance(answer, str):
            raise ValueError(answer)
        return answer

    try:
        yield ask
    finally:
        _idle_readers.append(worker)


def _bomb(path: Path) -> UserError:
    return UserError(
        f"{path}: expands more than {LARGEST_RATIO} times, like a compression bomb; unpack it and give a .jsonl "
        "file, or leave it out"
    )


def read_hub(name: str, skip: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """(`hf:…: row n`, object) of each row of `hf:NAME[:config][:split]` from row `skip` on, streamed by `datasets`.

    The split defaults to `train`. Raises UserError if the package or the data set is missing.
    """
    path, config, split = hub_parts(name)
    with _hub_errors(name) as datasets:
        rows = datasets.load_dataset(path, config or None, split=split or "train", streaming=True).skip(skip)
        for number, values in enumerate(rows, start=skip + 1):
            yield f"{name}: row {number}", dict(values)


def hub_parts(name: str) -> tuple[str, str, str]:
    """Data set, config and split of `hf:NAME[:config][:split]`; missing parts are empty."""
    path, config, split = [*name.removeprefix(HUB).split(":"), "", ""][:3]
    return path, config, split


def hub_splits(name: str) -> list[str]:
    """The splits of a data set on the hub. Raises UserError as `read_hub` does."""
    path, config, _ = hub_parts(name)
    with _hub_errors(name) as datasets:
        return [str(split) for split in datasets.get_dataset_split_names(path, config or None)]


@contextmanager
def _hub_errors(name: str) -> Iterator[Any]:
    """The package `datasets`; its errors become UserErrors."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{name}: datasets is not installed; pip install datasets, or give files") from error
    try:
        yield datasets
    except (OSError, LookupError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"{name}: cannot be read ({type(error).__name__}: {error}); give hf:NAME[:config][:split]"
        ) from error
