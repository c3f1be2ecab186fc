"""Lines of people's files end at line feeds alone: not at U+2028, U+0085 or form feeds, as in `str.splitlines`."""

import gzip
import json

import pytest

from lockstep.data import TextSource
from lockstep.data.records import Tally, read_records
from lockstep.rl.environments.code_harness import lines_of
from lockstep.rl.environments.loading import load_environment
from lockstep.rl.rollouts.prompts import examples_of

TEXT = "one\u2028two\u2029three\x85four"
"""Valid in JSON strings as it is, unlike control characters."""
TEXTS = [TEXT, "five"]


def jsonl(**keys: str) -> str:
    return "".join(json.dumps({"text": text, **keys}, ensure_ascii=False) + "\n" for text in TEXTS)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json"])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_records(tmp_path, name, ending):
    text = jsonl().replace("\n", ending)
    if name == "a.json":
        text = f"[{text.strip().replace(ending, ',' + ending)}]"
    opened = gzip.open if name.endswith("gz") else open
    with opened(tmp_path / name, "wb") as file:
        file.write(text.encode())
    assert [record["text"] for _, record in read_records(tmp_path / name, False, Tally())] == TEXTS


def test_documents_of_text_and_of_jsonl(tmp_path):
    (tmp_path / "a.txt").write_bytes((TEXT + "\x0c\x0b\n").encode())
    assert list(TextSource(str(tmp_path / "a.txt"))) == [TEXT + "\x0c\x0b\n"]
    (tmp_path / "a.jsonl").write_text(jsonl(), encoding="utf-8")
    assert list(TextSource(str(tmp_path / "a.jsonl"))) == TEXTS


def test_problems_of_environments(tmp_path):
    (tmp_path / "train.jsonl").write_text(jsonl(problem=TEXT, answer="5"), encoding="utf-8")
    examples = examples_of(load_environment("math", str(tmp_path)), "train")
    assert [example.id.rpartition(":")[2] for example in examples] == ["1", "2"]
    assert examples[0].prompt.startswith(TEXT)


def test_lines_that_programs_print():
    assert lines_of(f"{TEXT}\x0c5 \r\n6\n\n") == [f"{TEXT}\x0c5", "6"]
    assert lines_of("5\x0c6") != lines_of("5\n6")
