"""Text sources and their tokens: all of the text, and what is no text named."""

import bz2
import gzip
import io
import itertools
import lzma
import zipfile

import pyarrow as pa
import pytest
from pyarrow import parquet

from lockstep.data import ByteTokenizer, TextSource, text, tokenize_documents
from lockstep.errors import UserError


def test_files_folders_globs_and_keys(tmp_path):
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "c.jsonl").write_text('{"text": "three", "more": "four"}\n\n{"text": "five", "more": "six"}\n')
    assert list(TextSource(str(tmp_path))) == ["one", "two", "three", "five"]
    assert list(TextSource(str(tmp_path / "*.txt"))) == ["one", "two"]
    assert list(TextSource(str(tmp_path / "c.jsonl"), "{text}\n{more}")) == ["three\nfour", "five\nsix"]


def test_the_default_is_the_standard_library_on_every_machine():
    texts = list(itertools.islice(TextSource(), 20))
    assert len(texts) == 20 and any("def " in t for t in texts)


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
    ],
)
def test_a_bad_line_is_named_or_counted(tmp_path, line, message):
    path = tmp_path / "c.jsonl"
    written = line.encode(errors="surrogateescape" if "\udce9" in line else "surrogatepass")
    path.write_bytes(b'{"text": "fine"}\n' + written + b"\n")
    with pytest.raises(UserError, match=message):
        list(TextSource(str(path)))
    source = TextSource(str(path), skip_bad_lines=True)
    assert list(source) == ["fine"] and source.tally.skipped_lines == 1
    assert list(source) == ["fine"] and source.tally.skipped_lines == 1, "a second reading does not count twice"


@pytest.mark.parametrize("longest", [4, text.LONGEST_PART])
def test_text_that_is_not_utf8_is_named_with_its_byte_or_its_lines_are_counted(tmp_path, monkeypatch, longest):
    monkeypatch.setattr(text, "LONGEST_PART", longest)
    path = tmp_path / "latin.txt"
    content = "日本 🙂\r\none\n".encode() + "a café\n".encode("latin-1") + b"two\rthree \xff\xfe\nfour"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"latin\.txt: byte {content.index(0xE9)} \(from 0\) is not UTF-8; .*iconv"):
        list(TextSource(str(path)))
    source = TextSource(str(path), skip_bad_lines=True)
    kept = "".join(source)
    if longest > 4:
        assert kept == "日本 🙂\none\nfour" and source.tally.skipped_lines == 2
    assert "\N{REPLACEMENT CHARACTER}" not in kept and not kept.encode().count(b"\r") and "four" in kept
    path.write_bytes("wholly fine 日本 🙂\r\nends in a cut character ".encode() + "日".encode()[:2])
    with pytest.raises(UserError, match=rf"byte {path.stat().st_size - 2} "):
        list(TextSource(str(path)))


def test_an_escaped_pair_is_a_character_and_not_an_error(tmp_path):
    (tmp_path / "c.jsonl").write_text('{"text": "\\ud83d\\ude42"}\n')
    assert list(TextSource(str(tmp_path / "c.jsonl"))) == ["🙂"]


def test_hidden_folders_are_left_out_and_what_is_no_text_is_refused(tmp_path):
    (tmp_path / ".git" / "refs").mkdir(parents=True)
    (tmp_path / ".git" / "refs" / "head").write_text("secret")
    (tmp_path / "a.md").write_text("one")
    assert list(TextSource(str(tmp_path))) == ["one"]
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0\0")
    with pytest.raises(UserError, match=r"picture\.png: contains NUL bytes"):
        list(TextSource(str(tmp_path)))


def _zipped(data):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("a.txt", data)
    return packed.getvalue()


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, _zipped], ids=lambda pack: pack.__name__)
def test_a_compressed_file_is_called_one_even_if_bad_lines_are_skipped(tmp_path, pack):
    (tmp_path / "a.txt.packed").write_bytes(pack(b"one two three\n" * 20))
    with pytest.raises(UserError, match=r"a\.txt\.packed: is (compressed with|a zip).* unpack it"):
        list(TextSource(str(tmp_path), skip_bad_lines=True))


@pytest.mark.parametrize("text", ["BZh is my text\n", "BZh9 too\n", "PAR1 text\n", "ARROW1 text\n", "PKZIP\n"])
def test_a_text_can_begin_as_other_formats_do(tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    assert list(TextSource(str(tmp_path))) == [text]


def test_a_parquet_or_arrow_file_with_another_name_is_called_one(tmp_path):
    table = pa.table({"text": ["one"]})
    parquet.write_table(table, tmp_path / "a.txt")
    with pytest.raises(UserError, match=r"a\.txt: is a Parquet file; give it a name that ends in \.parquet"):
        list(TextSource(str(tmp_path / "a.txt")))
    with pa.ipc.new_file(tmp_path / "b.txt", table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(UserError, match=r"b\.txt: is an Arrow file"):
        list(TextSource(str(tmp_path / "b.txt")))


@pytest.mark.parametrize("name", ["list.json", "table.csv"])
def test_a_file_of_records_in_no_form_that_is_read_is_text_only_among_other_files(tmp_path, name):
    (tmp_path / name).write_text('{\n"text": "one"}')
    with pytest.raises(UserError, match=rf"{name}: would be one document, .* to a \.jsonl file, one object per line"):
        TextSource(str(tmp_path / name))
    with pytest.raises(UserError, match=rf"{name}: would be one document"):
        TextSource(str(tmp_path / f"*{name[4:]}"))
    (tmp_path / "other.txt").write_text("two")
    assert len(list(TextSource(str(tmp_path / "*")))) == 2
    (tmp_path / "other.txt").unlink()
    assert list(TextSource(str(tmp_path))) == ['{\n"text": "one"}']


def test_an_empty_folder_is_called_empty(tmp_path):
    with pytest.raises(UserError, match="the folder contains no files"):
        TextSource(str(tmp_path))


@pytest.mark.parametrize(("template", "message"), [("text", "has no keys"), ("{text", "write keys as")])
def test_a_template_that_cannot_work_is_refused(tmp_path, template, message):
    (tmp_path / "c.jsonl").write_text('{"text": "fine"}\n')
    with pytest.raises(UserError, match=message):
        TextSource(str(tmp_path / "c.jsonl"), template)


def test_missing_and_empty_data_are_refused(tmp_path):
    with pytest.raises(UserError, match="no such file, folder or match"):
        TextSource(str(tmp_path / "none*"))
    with pytest.raises(UserError, match="contains no text"):
        tokenize_documents([""], ByteTokenizer())


def test_bpe_documents_are_those_of_encode(bpe_tokenizer):
    texts = ["def f(x):\n", "", "日本語 🙂"]
    corpus = tokenize_documents(texts, bpe_tokenizer)
    expected = [[*bpe_tokenizer.encode(t), bpe_tokenizer.eos_id] for t in texts if t]
    assert [corpus.tokens[a:b].tolist() for a, b in itertools.pairwise(corpus.offsets)] == expected
