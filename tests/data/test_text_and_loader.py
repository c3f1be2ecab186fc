"""Text sources and the loader: all of the text, each piece once an epoch, resumed to the piece."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data import ByteTokenizer, TextSource, TokenLoader, tokenize_documents
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
        ('{"text": 3}', "c.jsonl:2: key 'text'"),
    ],
)
def test_a_bad_line_is_named_or_counted(tmp_path, line, message):
    path = tmp_path / "c.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(UserError, match=message):
        list(TextSource(str(path)))
    source = TextSource(str(path), skip_bad_lines=True)
    assert list(source) == ["fine"] and source.skipped == 1


def test_missing_and_empty_data_are_refused(tmp_path):
    with pytest.raises(UserError, match="no such file, folder or match"):
        TextSource(str(tmp_path / "none*"))
    with pytest.raises(UserError, match="holds no text"):
        tokenize_documents([""], ByteTokenizer())


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    sequence_length=st.integers(4, 20),
    tokens_per_step=st.integers(10, 60),
    taken=st.integers(0, 10),
    seed=st.integers(0, 5),
)
def test_an_epoch_has_every_piece_once_and_a_loader_resumes_exactly(
    lengths, sequence_length, tokens_per_step, taken, seed
):
    texts = [chr(97 + i) * n for i, n in enumerate(lengths)]
    corpus = tokenize_documents(texts, ByteTokenizer())
    loader = TokenLoader(corpus, sequence_length, tokens_per_step, seed)
    pieces: list[list[int]] = []
    while len(pieces) < len(loader.starts):
        step = loader.next()
        assert len(step) == 1 or sum(map(len, step)) <= tokens_per_step
        pieces += step
    expected = [
        (text.encode() + b"\0")[i : i + sequence_length]
        for text in texts
        for i in range(0, len(text) + 1, sequence_length)
    ]
    epoch = sorted(bytes(0 if t == 256 else t for t in p) for p in pieces[: len(loader.starts)])
    assert epoch == sorted(p for p in expected if len(p) >= 2)

    loader.position = 0
    for _ in range(taken):
        loader.next()
    resumed = TokenLoader(corpus, sequence_length, tokens_per_step, seed)
    resumed.position = loader.position
    assert [resumed.next() for _ in range(3)] == [loader.next() for _ in range(3)]
    assert np.array_equal(corpus.offsets[1:] - corpus.offsets[:-1], np.array(lengths) + 1)
