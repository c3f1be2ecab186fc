"""Reads documents from text, JSON and Parquet files and from Hugging Face `datasets`."""

from __future__ import annotations

import glob
import itertools
import re
import string
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.data.records import HUB, Tally, holds_records, json_type, read_hub, read_records
from lockstep.errors import UserError

LONGEST_PART = 2**22
"""Maximum characters of a text file in memory at once."""
BINARY = re.compile(
    rb"\x1f\x8b|\x28\xb5\x2f\xfd|BZh[1-9](1AY&SY|\x17rE8P\x90)|\xfd7zXZ\0|PK\x03\x04|PAR1\x15|ARROW1\0\0"
)
"""The first bytes of compressed, Parquet and Arrow files."""
UNDECODED = re.compile("[\udc80-\udcff]")


class TextPart(NamedTuple):
    """The text of a document, or of a part of a very long one."""

    text: str
    ends: bool
    """Whether it is the document's last part."""


class TextSource:
    """Documents of a file, a folder, a glob or a data set, in order of file names; iterates over strings.

    Each line of a `.jsonl` or `.jsonl.gz` file, each item of a `.json` array, and each row of a `.parquet` file or of
    `hf:NAME[:config][:split]`, is a document: `template` with the values in place of the keys in braces. Any other file
    is one document; a folder's hidden files and folders are left out. Empty `data` is the source code of Python's
    standard library, which every machine has. `tally` has the counts of the latest pass.

    Raises UserError if nothing matches or the template is unusable, and, while iterating, for a bad line (file and
    line number; in a text file the byte that is not UTF-8), unless these are skipped, and for a file that is not text.
    """

    def __init__(self, data: str = "", template: str = "{text}", skip_bad_lines: bool = False):
        self.data = data
        self.template = template
        self.skip_bad_lines = skip_bad_lines
        self.tally = Tally()
        self.streamed = data.startswith(HUB)
        """Whether documents are tokenized during the run; the length is then unknown."""
        self.files = [] if self.streamed else find_files(data)
        whole = [p for p in self.files if p.suffix.lower() in (".json", ".csv") and not holds_records(p)]
        if self.files and not Path(data).is_dir() and whole == self.files:
            raise UserError(
                f"{self.files[0]}: would be one document, brackets and commas included; write its entries to a .jsonl "
                "file, one object per line, or give its folder if this is what you want"
            )
        try:
            self.keys = [key for _, key, _, _ in string.Formatter().parse(template) if key is not None]
        except ValueError as error:
            raise UserError(
                f"template {template!r}: {error}; write keys as {{key}}, and double a literal brace"
            ) from error
        if not self.keys:
            raise UserError(f'template {template!r} has no keys; write keys in braces, as in "{{text}}"')

    def __iter__(self) -> Iterator[str]:
        """Texts; a file of more than `LONGEST_PART` characters is split into several."""
        for part in self.read():
            yield part.text

    def read(self, skip: int = 0) -> Iterator[TextPart]:
        """The documents from number `skip` on, very long ones in parts. Only a streamed data set can skip."""
        self.tally = Tally()
        if self.streamed:
            for where, values in read_hub(self.data, skip):
                yield TextPart(self._text(where, values), True)
        for path in self.files:
            if holds_records(path):
                for where, values in read_records(path, self.skip_bad_lines, self.tally, self.keys):
                    if self.skip_bad_lines and self._bad_keys(values):
                        self.tally.skipped_lines += 1
                    else:
                        yield TextPart(self._text(where, values), True)
            else:
                yield from _read_text(path, self.skip_bad_lines, self.tally)

    def describe(self) -> dict[str, Any]:
        """Everything but the files that determines the documents."""
        return {"template": self.template}

    def _bad_keys(self, values: dict[str, Any]) -> list[str]:
        return [key for key in self.keys if not isinstance(values.get(key), str)]

    def _text(self, where: str, values: dict[str, Any]) -> str:
        if not (bad := self._bad_keys(values)):
            return self.template.format_map(values)
        if self.skip_bad_lines:
            # Rows of a data set are counted, so an empty document takes its place.
            self.tally.skipped_lines += 1
            return ""
        is_what = f"is {json_type(values[bad[0]])}, not a text" if bad[0] in values else "is missing"
        chats = "; these are conversations: use lockstep sft, or data tokenize --chat"
        raise UserError(
            f"{where}: key {bad[0]!r} {is_what}; name the line's keys in --template "
            f"(here: {', '.join(values):.200}), or use --skip-bad-lines{chats * ('messages' in values)}"
        )


def find_files(data: str) -> list[Path]:
    """The files of a path, a folder or a glob, by name; empty: the standard library's source.

    Raises UserError if there are none.
    """
    if not data:
        return _standard_library()
    path = Path(data)
    if path.is_dir():
        files = [p for p in sorted(path.rglob("*")) if p.is_file() and not _hidden(p.relative_to(path))]
    elif path.is_file():
        files = [path]
    else:
        files = [Path(p) for p in sorted(glob.glob(data, recursive=True)) if Path(p).is_file()]
    if not files:
        empty = "the folder contains no files" if path.is_dir() else "no such file, folder or match"
        raise UserError(f"{data}: {empty}; give text, .jsonl, .json or .parquet files")
    return files


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _read_text(path: Path, skip_bad_lines: bool, tally: Tally) -> Iterator[TextPart]:
    offset = 0
    try:
        with path.open("rb") as file:
            if BINARY.match(file.read(16)):
                raise UserError(
                    f"{path}: is compressed, or a Parquet or Arrow file, not text; unpack it or leave it out, or give "
                    "it a name that ends in .jsonl.gz or .parquet"
                )
        # Bytes that are not UTF-8 become surrogates, detected below; line ends are unchanged, for the offset.
        with path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
            # Parts end at a line's end, so that no word is cut, unless the line is too long.
            parts = (text + file.readline(LONGEST_PART) for text in iter(lambda: file.read(LONGEST_PART), ""))
            for text, following in itertools.pairwise(itertools.chain(parts, [""])):
                if "\0" in text:
                    raise UserError(
                        f"{path}: contains NUL bytes, so it is not text; "
                        'leave it out, in a folder with a glob such as "folder/**/*.txt"'
                    )
                try:
                    offset += len(text.encode())
                except UnicodeEncodeError as error:
                    offset += len(text[: error.start].encode())
                    if not skip_bad_lines:
                        raise UserError(
                            f"{path}: byte {offset} (from 0) is not UTF-8; convert the file, for example with "
                            "iconv -t UTF-8, or use --skip-bad-lines to leave out its line"
                        ) from error
                    lines = text.split("\n")
                    good = [line for line in lines if not UNDECODED.search(line)]
                    tally.skipped_lines += len(lines) - len(good)
                    text = "\n".join(good)
                yield TextPart(text.replace("\r\n", "\n").replace("\r", "\n"), not following)
        size = path.stat().st_size
        if not size:
            yield TextPart("", True)
        tally.bytes_read += size
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); fix it or leave it out") from error


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    files = [p for p in sorted(root.rglob("*.py")) if not left_out.intersection(p.relative_to(root).parts)]
    if not files:
        raise UserError(f"{root}: the standard library's source is not on this machine; give text with --data")
    return files
