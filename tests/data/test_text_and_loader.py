"""Text sources and the loader: all of the text, each piece once an epoch, resumed to the piece."""

import itertools
import json

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
        ('{"other": "x"}', r"c.jsonl:2: key 'text' .*\(here: other\)"),
        ('{"text": "half a pair: \\ud83d"}', "c.jsonl:2: .*surrogates not allowed"),
        ("[" * 100_000, "c.jsonl:2: .*nested too deep"),
    ],
)
def test_a_bad_line_is_named_or_counted(tmp_path, line, message):
    path = tmp_path / "c.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(UserError, match=message):
        list(TextSource(str(path)))
    source = TextSource(str(path), skip_bad_lines=True)
    assert list(source) == ["fine"] and source.skipped == 1
    assert list(source) == ["fine"] and source.skipped == 1, "a second reading does not count twice"


def test_an_escaped_pair_is_a_character_and_not_an_error(tmp_path):
    (tmp_path / "c.jsonl").write_text('{"text": "\\ud83d\\ude42"}\n')
    assert list(TextSource(str(tmp_path / "c.jsonl"))) == ["🙂"]


def test_hidden_folders_are_left_out_and_what_is_no_text_is_refused(tmp_path):
    (tmp_path / ".git" / "refs").mkdir(parents=True)
    (tmp_path / ".git" / "refs" / "head").write_text("secret")
    (tmp_path / "a.md").write_text("one")
    assert list(TextSource(str(tmp_path))) == ["one"]
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0\0")
    with pytest.raises(UserError, match=r"picture\.png: holds NUL bytes"):
        list(TextSource(str(tmp_path)))


@pytest.mark.parametrize(("template", "message"), [("text", "names no key"), ("{text", "write keys as")])
def test_a_template_that_cannot_work_is_refused(tmp_path, template, message):
    (tmp_path / "c.jsonl").write_text('{"text": "fine"}\n')
    with pytest.raises(UserError, match=message):
        TextSource(str(tmp_path / "c.jsonl"), template)


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
    resumed.load_state(json.loads(json.dumps(loader.state())))
    assert [resumed.next() for _ in range(3)] == [loader.next() for _ in range(3)]
    assert np.array_equal(corpus.offsets[1:] - corpus.offsets[:-1], np.array(lengths) + 1)


def test_a_limit_stops_after_the_document_that_reaches_it():
    whole = tokenize_documents(["abc", "de", "fgh"], ByteTokenizer())
    assert whole.offsets.tolist() == [0, 4, 7, 11]
    assert tokenize_documents(["abc", "de", "fgh"], ByteTokenizer(), limit_tokens=5).offsets.tolist() == [0, 4, 7]


def test_bpe_documents_are_those_of_encode(bpe_tokenizer):
    texts = ["def f(x):\n", "", "日本語 🙂"]
    corpus = tokenize_documents(texts, bpe_tokenizer)
    expected = [[*bpe_tokenizer.encode(t), bpe_tokenizer.eos_id] for t in texts if t]
    assert [corpus.tokens[a:b].tolist() for a, b in itertools.pairwise(corpus.offsets)] == expected


@pytest.mark.parametrize(
    ("texts", "sequence_length", "seed", "message"),
    [
        (["abcdefgh"] * 4, 8, 0, "sequences: 6 when the run was saved, 4 now"),
        (["abcdefgh"] * 6, 8, 1, "seed: 0 when the run was saved, 1 now"),
    ],
)
def test_a_loader_refuses_the_state_of_other_data(texts, sequence_length, seed, message):
    state = TokenLoader(tokenize_documents(["abcdefgh"] * 6, ByteTokenizer()), 8, 16, 0).state()
    loader = TokenLoader(tokenize_documents(texts, ByteTokenizer()), sequence_length, 16, seed)
    with pytest.raises(UserError, match=message):
        loader.load_state(state)


def test_a_sequence_too_short_to_predict_is_refused():
    with pytest.raises(UserError, match="sequence_length is 1"):
        TokenLoader(tokenize_documents(["abc"], ByteTokenizer()), 1, 16, 0)
