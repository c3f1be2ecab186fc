"""Files of people: all of their text or objects is read, line by line, and what cannot be read is named."""

import bz2
import gzip
import io
import json
import lzma
import random
import re
import sys
import zipfile

import pyarrow as pa
import pytest
from pyarrow import parquet

from lockstep.cli import main
from lockstep.data import ByteTokenizer, ConversationSource, TextSource, records, text, tokenize_documents
from lockstep.data.records import Tally, holds_records, read_records
from lockstep.errors import UserError
from lockstep.rl.environments.code_harness import lines_of
from lockstep.rl.environments.loading import load_environment
from lockstep.rl.rollouts.prompts import examples_of

TEXTS = [f"document {i}: " + "word " * (i % 7) + "日本語 🙂" for i in range(20)]
BREAKS = "one\u2028two\u2029three\x85four"
"""Line breaks to `str.splitlines`, valid in JSON strings as they are, unlike control characters."""


def jsonl(texts, **keys):
    return "".join(json.dumps({"text": text, **keys}, ensure_ascii=False) + "\n" for text in texts)


def refused(message, source):
    with pytest.raises(UserError, match=message):
        list(source())


def test_the_same_documents_are_read_from_every_form_of_file(tmp_path):
    lines = jsonl(TEXTS, more="x").encode()
    forms = {
        "a.jsonl": lines, "B.Jsonl.GZ": gzip.compress(lines), "c.json": lines, "d.jsonl": lines.replace(b"\n", b"\r\n"),
        "e.json": b"[" + lines.strip().replace(b"\n", b",\n") + b"]",
    }  # fmt: skip
    for name, content in forms.items():
        (tmp_path / name).write_bytes(content)
    parquet.write_table(pa.table({"text": TEXTS}), tmp_path / "f.parquet", row_group_size=7)
    for path in tmp_path.iterdir():
        source = TextSource(str(path))
        assert list(source) == TEXTS
        # All of the file has been counted; of Parquet whole row groups' shares, rounded down.
        assert abs(source.tally.bytes_read - path.stat().st_size) < 10
    assert list(TextSource(str(tmp_path / "a.jsonl"), "{more}\n{text}")) == [f"x\n{text}" for text in TEXTS]
    assert list(TextSource(str(tmp_path / "*.json*"))) == TEXTS * 4, "a glob, in order of names"


def test_lines_end_at_line_feeds_alone(tmp_path):
    texts = [BREAKS, "five"]
    for name in ("a.jsonl", "a.jsonl.gz"):
        packed = gzip.compress if name.endswith("gz") else bytes
        (tmp_path / name).write_bytes(packed(jsonl(texts).replace("\n", "\r\n").encode()))
        assert [record["text"] for _, record in read_records(tmp_path / name, False, Tally())] == texts
    (tmp_path / "a.txt").write_bytes((BREAKS + "\x0c\x0b\n").encode())
    assert list(TextSource(str(tmp_path / "a.txt"))) == [BREAKS + "\x0c\x0b\n"]
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text(jsonl(texts, problem=BREAKS, answer="5"), encoding="utf-8")
    examples = examples_of(load_environment("math", str(tmp_path / "set")), "train")
    assert [example.id.rpartition(":")[2] for example in examples] == ["1", "2"]
    assert examples[0].prompt.startswith(BREAKS)
    assert lines_of(f"{BREAKS}\x0c5 \r\n6\n\n") == [f"{BREAKS}\x0c5", "6"] and lines_of("5\x0c6") != lines_of("5\n6")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", "c.jsonl:2: not a JSON object"),
        ("[1]", "c.jsonl:2: .*a list"),
        ('{"text": 3}', "c.jsonl:2: key 'text' is a number, not a text"),
        ('{"other": "x"}', r"c.jsonl:2: key 'text' is missing.*\(here: other\)"),
        ('{"text": "half a pair: \\ud83d"}', "c.jsonl:2: .*surrogates not allowed"),
        ('{"text": "half a pair, in bytes: \ud83d"}', "c.jsonl:2: .*surrogates not allowed"),
        ('{"text": "caf\udce9"}', "c.jsonl:2: not a JSON object .*byte 13 of the line, from 0, is not UTF-8"),
        ("[" * 100_000, "c.jsonl:2: .*nested too deep"),
        ('{"text": "' + "x" * 950 + '"}', r"c.jsonl:2: .*longer than 500 bytes"),
        ('{"text": "two", "x": [' + "{}," * 101 + "{}]}", "c.jsonl:2: .*has the character , more than 100 times"),
    ],
    ids=lambda value: value[:30],
)
def test_a_bad_line_is_named_or_counted(tmp_path, monkeypatch, line, message):
    monkeypatch.setattr(records, "MOST_VALUES", 100_001 if line[0] == "[" else 100)
    monkeypatch.setattr(records, "LONGEST_LINE", 500 if "xxx" in line else 2**28)
    path = tmp_path / "c.jsonl"
    written = line.encode(errors="surrogateescape" if "\udce9" in line else "surrogatepass")
    path.write_bytes(b'{"text": "fine \\ud83d\\ude42"}\n' + written + b"\n" + b'{"text": "two"}\n')
    refused(message, lambda: TextSource(str(path)))
    source = TextSource(str(path), skip_bad_lines=True)
    for _ in range(2):  # a second reading does not count twice
        assert list(source) == ["fine 🙂", "two"] and source.tally.skipped_lines == 1


@pytest.mark.parametrize("longest", [4, text.LONGEST_PART])
def test_text_that_is_not_utf8_is_named_with_its_byte_or_its_lines_are_counted(tmp_path, monkeypatch, longest):
    monkeypatch.setattr(text, "LONGEST_PART", longest)
    path = tmp_path / "latin.txt"
    content = "日本 🙂\r\none\n".encode() + "a café\n".encode("latin-1") + b"two\rthree \xff\xfe\nfour"
    path.write_bytes(content)
    place = rf"latin\.txt: byte {content.index(0xE9)} \(from 0\) is not UTF-8; .*iconv"
    refused(place, lambda: TextSource(str(path)))
    source = TextSource(str(path), skip_bad_lines=True)
    kept = "".join(source)
    if longest > 4:
        assert kept == "日本 🙂\none\nfour" and source.tally.skipped_lines == 2
    assert "\N{REPLACEMENT CHARACTER}" not in kept and not kept.encode().count(b"\r") and "four" in kept
    path.write_bytes("wholly fine 日本 🙂\r\nends in a cut character ".encode() + "日".encode()[:2])
    refused(rf"byte {path.stat().st_size - 2} ", lambda: TextSource(str(path)))


def test_a_long_text_file_is_one_document_read_in_parts(tmp_path, monkeypatch):
    content = "".join(f"line {i} of a long text\n" for i in range(400)) + "y" * 500
    (tmp_path / "a.txt").write_text(content)
    monkeypatch.setattr(text, "LONGEST_PART", 300)
    parts = list(TextSource(str(tmp_path)).read())
    assert len(parts) > 20 and max(len(part.text) for part in parts) <= 2 * 300
    assert "".join(part.text for part in parts) == content
    assert [part.ends for part in parts] == [False] * (len(parts) - 1) + [True]


def _zipped(data):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("a.txt", data)
    return packed.getvalue()


def test_what_is_no_text_is_named_and_hidden_files_are_left_out(tmp_path):
    (tmp_path / ".git" / "refs").mkdir(parents=True)
    refused("the folder contains no files", lambda: TextSource(str(tmp_path / ".git" / "refs")))
    (tmp_path / ".git" / "refs" / "head").write_text("secret")
    (tmp_path / "a.md").write_text("one")
    assert list(TextSource(str(tmp_path))) == ["one"]
    arrow, table = io.BytesIO(), pa.table({"text": ["one"]})
    with pa.ipc.new_file(arrow, table.schema) as writer:
        writer.write_table(table)
    parquet.write_table(table, tmp_path / ".hidden")
    words, packers = b"one two three\n" * 20, (gzip.compress, bz2.compress, lzma.compress, _zipped)
    for content, message in (
        (b"\x89PNG\0\0\0", "contains NUL bytes"),
        *((pack(words), "is compressed, .* unpack it") for pack in packers),
        ((tmp_path / ".hidden").read_bytes(), r"is compressed, or a Parquet .*a name that ends in .*\.parquet"),
        (arrow.getvalue(), "is compressed, or a Parquet or Arrow file"),
    ):
        (tmp_path / "b.txt").write_bytes(content)
        refused(rf"b\.txt: {message}", lambda: TextSource(str(tmp_path), skip_bad_lines=True))
    for words in ("BZh is my text\n", "BZh9 too\n", "PAR1 text\n", "ARROW1 text\n", "PKZIP\n"):
        (tmp_path / "b.txt").write_text(words)
        assert list(TextSource(str(tmp_path / "b.txt"))) == [words]
    refused("no such file, folder or match", lambda: TextSource(str(tmp_path / "none*")))
    for template, message in (("text", "has no keys"), ("{text", "write keys as")):
        refused(message, lambda template=template: TextSource(str(tmp_path), template))
    refused("contains no text", lambda: tokenize_documents([""], ByteTokenizer()).offsets)


@pytest.mark.parametrize("name", ["list.json", "table.csv"])
def test_a_file_of_records_in_no_form_that_is_read_is_text_only_among_other_files(tmp_path, name):
    (tmp_path / name).write_text('{\n"text": "one"}')
    assert not holds_records(tmp_path / name)
    for data in (tmp_path / name, tmp_path / f"*{name[4:]}"):
        refused(rf"{name}: would be one document, .* to a \.jsonl file, one", lambda data=data: TextSource(str(data)))
    assert list(TextSource(str(tmp_path))) == ['{\n"text": "one"}']
    (tmp_path / "other.txt").write_text("two")
    assert len(list(TextSource(str(tmp_path / "*")))) == 2


def test_what_cannot_be_read_is_named(tmp_path, monkeypatch):
    whole = gzip.compress(json.dumps({"text": "abcdefg" * 50}).encode() + b"\n")
    # A kind of block that there is not, and a wrong checksum at the end.
    damaged = [whole[:at] + bytes([whole[at] ^ 0xFF | 0x07]) + whole[at + 1 :] for at in (10, len(whole) - 7)]
    contents = [b"\x1f\x8bno gzip", b"plain", gzip.compress(b'{"text": "a"}\n' * 1000)[:-20], *damaged]
    for name, content in (("a.parquet", b"no parquet"), *(("b.jsonl.gz", content) for content in contents)):
        (tmp_path / name).write_bytes(content)
        refused(f"{name}: cannot be read", lambda name=name: TextSource(str(tmp_path / name)))
    for package, data in {"pyarrow": str(tmp_path / "a.parquet"), "datasets": "hf:some/data"}.items():
        with monkeypatch.context() as without:
            without.setitem(sys.modules, package, None)
            refused(f"{package} is not installed; pip install {package}", lambda data=data: TextSource(data))
    for nothing in ("hf:/nowhere/at/all", "hf:", "hf::x"):
        refused(f"{nothing}: cannot be read .*give hf:NAME", lambda nothing=nothing: TextSource(nothing))


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("content", [b"\n", b"x", b'{"text": "a"}\n'])
def test_a_file_that_expands_as_no_text_does_is_refused(tmp_path, monkeypatch, content, skip):
    monkeypatch.setattr(records, "UNPACKED_FREELY", 2**16)
    monkeypatch.setattr(records, "LONGEST_LINE", 2**14)
    monkeypatch.setattr(records, "LARGEST_RATIO", 50)
    (tmp_path / "bomb.jsonl.gz").write_bytes(gzip.compress(content * (2**20 // len(content))))
    message = "longer than 16384 bytes" if content == b"x" and not skip else "expands more than 50 times"
    refused(rf"bomb\.jsonl\.gz.*{message}", lambda: TextSource(str(tmp_path / "bomb.jsonl.gz"), skip_bad_lines=skip))


def _value(draw, depth=0):
    kind = draw.choice(["text", "number", "word"] + ["list", "object"] * (depth < 3))
    if kind == "text":
        return "".join(draw.choice('ab "\\,:[]{}\n\té🙂') for _ in range(draw.randrange(8)))
    if kind in ("number", "word"):
        return draw.choice([0, -1, 1.5, 1e300] if kind == "number" else [True, False, None])
    values = [_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    return values if kind == "list" else {draw.choice(["a", "b", 'c"', "d]", "{"]): value for value in values}


def test_the_items_of_an_array_are_those_that_json_reads(tmp_path):
    draw, path = random.Random(0), tmp_path / "a.json"
    for _ in range(100):
        objects = [{"k": _value(draw)} for _ in range(draw.randrange(5))]
        content = json.dumps(objects, indent=draw.choice([None, 2]), ensure_ascii=draw.random() < 0.5)
        path.write_text(draw.choice(["", "\n  "]) + content + draw.choice(["", "\n"]))
        assert [values for _, values in read_records(path, False, Tally())] == objects == json.loads(path.read_text())
    path.write_text('[{"a": 1}, 5, {"a": 2}]')
    tally = Tally()
    assert [v for _, v in read_records(path, True, tally)] == [{"a": 1}, {"a": 2}]
    assert tally.skipped_lines == 1 and tally.bytes_read == path.stat().st_size
    assert [c.where for c in ConversationSource(str(path), True).read()] == [f"{path}: item 1", f"{path}: item 3"]


def test_an_array_that_is_not_one_of_objects_or_too_large_is_named(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    for content, problem in (
        ('[{"a": 1}, 5]', "item 2: not a JSON object"),
        ('[{"a": 1}, ]', "item 2: not a JSON object"),
        ('[{"a" 1}]', "item 1: not a JSON object"),
        ('[{"a": 1}', "the array is not closed"),
        ('[{"a": "x}]', "the array is not closed"),
        ('[{"a": "' + '\\"' * 100_000, "the array is not closed"),
        ('[{"a": 1}] {}', "text follows the array"),
    ):
        path.write_text(content)
        refused(f"a.json: {problem}", lambda: read_records(path, False, Tally()))
    path.write_text('[{"a": 1}]')
    monkeypatch.setattr(records, "LONGEST_LINE", 9)
    refused("has 10 bytes; an array can have at most 9; write .* .jsonl", lambda: read_records(path, False, Tally()))


PROBLEMS = [{"question": f"{n} + {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"} for n in range(40)]
TRAINED, HELD_OUT = [p for n, p in enumerate(PROBLEMS) if n % 10 != 9], PROBLEMS[9::10]


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "hf", "hf with a test split", "folder"])
def test_environments_have_the_same_problems_from_every_form(tmp_path, kind):
    if kind == "folder":
        for name, problems in (("train", TRAINED), ("test", HELD_OUT)):
            parquet.write_table(pa.Table.from_pylist(problems), tmp_path / f"{name}.parquet")
    elif kind == "json":
        (tmp_path / "p.json").write_text(json.dumps(PROBLEMS))
    elif kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(PROBLEMS), tmp_path / "p.parquet")
    else:
        lines = {"train" if kind.startswith("hf") else "p": TRAINED if "test" in kind else PROBLEMS}
        for name, problems in (lines | ({"test": HELD_OUT} if "test" in kind else {})).items():
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    data = f"hf:{tmp_path}" if kind.startswith("hf") else str(tmp_path / f"p.{kind}")
    for name in ("gsm8k", "math"):
        environment = load_environment(name, str(tmp_path) if kind == "folder" else data)
        answers = {split: [e.answer for e in environment.examples(split)] for split in ("train", "validation")}
        assert answers["validation"] == [str(2 * n) for n in range(9, 40, 10)]
        assert answers["train"] == [str(2 * n) for n in range(40) if n % 10 != 9]


def test_problems_that_are_skipped_move_no_other_and_a_test_split_is_not_validated_on(tmp_path):
    lines = [json.dumps(problem) + "\n" for problem in PROBLEMS]
    (tmp_path / "p.jsonl").write_text("".join([*lines[:4], "{\n", *lines[5:]]))
    environment = load_environment("math", str(tmp_path / "p.jsonl"), skip_bad_lines=True)
    assert [e.answer for e in environment.examples("validation")] == [str(2 * n) for n in range(9, 40, 10)]
    (tmp_path / "p.jsonl").unlink()
    for name, line in zip(("train", "validation", "test"), lines):
        (tmp_path / f"{name}.jsonl").write_text(line)
    assert [e.answer for e in load_environment("gsm8k", str(tmp_path)).examples("validation")] == ["2"]
    (tmp_path / "train.jsonl").rename(tmp_path / "dev.jsonl")
    (tmp_path / "test.jsonl").unlink()
    with pytest.raises(UserError, match=re.escape(f"hf:{tmp_path}: has no split train; name one of ")):
        list(load_environment("gsm8k", f"hf:{tmp_path}").examples("train"))


def test_generate_reads_prompts_from_an_array_and_from_a_data_set(tmp_path, model_folder):
    (tmp_path / "train.json").write_text(json.dumps([{"prompt": "one", "n": 1}, {"prompt": "two", "n": 2}]))
    for prompts in (str(tmp_path / "train.json"), f"hf:{tmp_path}"):
        command = ["generate", "--model", str(model_folder), "--prompts", prompts, "--max-tokens", "2", "--overwrite"]
        assert main([*command, "--output", str(tmp_path / "out" / "a.jsonl"), "--device", "cpu"]) == 0
        written = (tmp_path / "out" / "a.jsonl").read_text().splitlines()
        assert [json.loads(line)["n"] for line in written] == [1, 2]
