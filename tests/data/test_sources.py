"""Every source gives the same documents: files of each kind, a data set as a stream, tokens kept on disk, a mixture."""

import itertools
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.cli import main
from lockstep.config import DataConfig, PretrainConfig
from lockstep.data import (
    ByteTokenizer,
    Rows,
    TextEncoder,
    TextSource,
    TokenizedCorpus,
    load_tokenizer,
    open_rows,
    open_token_folder,
    parse_data,
    text,
    tokenize_documents,
    write_token_folder,
)
from lockstep.data import open as opening
from lockstep.data.corpus import collect
from lockstep.data.loader import MixedRows
from lockstep.data.open import StreamedDocuments
from lockstep.data.workers import encode_all
from lockstep.errors import UserError
from lockstep.train.pretrain import pretrain
from tests.data.failing import Fails, Imported

TEXTS = [f"document {i}: " + "word " * (i % 7) + "日本語 🙂" for i in range(60)]
ENCODER = TextEncoder(ByteTokenizer())


def _jsonl(path, texts=TEXTS):
    path.write_text("".join(json.dumps({"text": t, "n": i}) + "\n" for i, t in enumerate(texts)))
    return path


def _read(source, encoder=ENCODER, workers=0):
    return collect(encode_all(source.read(), encoder, workers), lambda: source.tally, np.uint16, source.skip_bad_lines)


def test_workers_give_what_one_process_gives_in_order_or_raise_what_went_wrong(tmp_path, bpe_tokenizer, monkeypatch):
    source = TextSource(str(_jsonl(tmp_path / "a.jsonl", TEXTS * 60)))
    encoder = TextEncoder(bpe_tokenizer)
    alone, together = _read(source, encoder), _read(source, encoder, workers=2)
    assert np.array_equal(alone.tokens, together.tokens) and np.array_equal(alone.offsets, together.offsets)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    for first, message in (("fail", "ValueError: no such token"), ("die", "process ended with code -9")):
        parts = (text.TextPart(t, True) for t in [first, *TEXTS])
        with pytest.raises(RuntimeError, match=message):
            list(encode_all(parts, Fails(ByteTokenizer()), workers=1))
    # It imports no PyTorch, which takes 4 s and 300 MB, for each core.
    with pytest.raises(RuntimeError) as raised:
        list(encode_all([text.TextPart(TEXTS[0], True)], Imported(bpe_tokenizer), workers=1))
    imported = str(raised.value).split()
    assert "tokenizers" in imported and "torch" not in imported


def test_tokens_on_disk_are_those_in_memory_and_bad_data_leaves_no_folder(tmp_path, bpe_tokenizer):
    source = TextSource(str(_jsonl(tmp_path / "a.jsonl", ["", *TEXTS])))
    encoder = TextEncoder(bpe_tokenizer)
    write_token_folder(tmp_path / "tokens", source, encoder)
    corpus, expected = open_token_folder(tmp_path / "tokens", bpe_tokenizer), _read(source, encoder)
    assert isinstance(corpus.tokens, np.memmap) and np.array_equal(corpus.tokens, expected.tokens)
    assert np.array_equal(corpus.offsets, expected.offsets) and corpus.counts["empty_documents"] == 1
    texts = [[*bpe_tokenizer.encode(text), bpe_tokenizer.eos_id] for text in TEXTS]
    assert [corpus.tokens[a:b].tolist() for a, b in itertools.pairwise(corpus.offsets)] == texts
    with pytest.raises(UserError, match="a different tokenizer"):
        open_token_folder(tmp_path / "tokens", ByteTokenizer())
    os.truncate(tmp_path / "tokens" / "tokens.bin", 10)
    with pytest.raises(UserError, match=r"tokens\.bin: has 10 bytes instead of \d+; delete"):
        open_token_folder(tmp_path / "tokens")
    shutil.rmtree(tmp_path / "tokens")
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{oops\n')
    with pytest.raises(UserError, match=r"a\.jsonl:2"):
        write_token_folder(tmp_path / "tokens", TextSource(str(tmp_path / "a.jsonl")), ENCODER)
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_folder_of_tokens_says_only_what_it_may(tmp_path):
    folder, most = tmp_path / "tokens", 2**63 - 1
    write_token_folder(folder, TextSource(str(_jsonl(tmp_path / "a.jsonl", ["abcde", "fg", "h", "i"]))), ENCODER)
    about = json.loads((folder / "tokens.json").read_text())
    for values, message in (
        *(
            (bad, r"tokens\.json: cannot be read")
            for bad in ({"dtype": "O"}, {"dtype": "int16"}, {"counts": {"a": "b"}})
        ),
        ({"tokens": float("inf")}, r"tokens\.json: cannot be read"),
        ({"tokens": -1}, r"tokens\.bin: has"),
        ({"documents": -1}, r"offsets\.bin: has"),
    ):
        (folder / "tokens.json").write_text(json.dumps(about | values))
        with pytest.raises(UserError, match=message):
            open_token_folder(folder)
    (folder / "tokens.json").write_text(json.dumps(about))
    # The differences of the last ones wrap around.
    for offsets in ([1, 6, 9, 11, 13], [0, 6, 9, 11, 12], [0, 14, 13, 13, 13], [0, most, -most - 1, -1, 13]):
        np.array(offsets, dtype=np.int64).tofile(folder / "offsets.bin")
        with pytest.raises(UserError, match=r"offsets\.bin: the offsets do not ascend from 0 to 13; tokenize again"):
            open_token_folder(folder)


def test_a_token_outside_of_the_vocabulary_is_named_by_whoever_reads_it(tmp_path):
    folder = tmp_path / "tokens"
    write_token_folder(folder, TextSource(str(_jsonl(tmp_path / "a.jsonl", ["abcde", "fgh"]))), ENCODER)
    tokens = np.fromfile(folder / "tokens.bin", np.uint16)
    tokens[7:9] = 258, 999
    tokens.tofile(folder / "tokens.bin")
    # The first row of 6 tokens is the first document, the second the other one: reading starts nowhere else.
    rows = open_rows([(folder, 1.0)], ENCODER, DataConfig(packing="whole", repeat=False), 6, 0)
    plans = sorted((rows.plan(), rows.plan()), key=lambda pieces: pieces[0].start)
    assert rows.read(plans[0]).tokens.tolist() == [*b"abcde", 256]
    with pytest.raises(UserError, match=r"tokens: token 7 \(from 0\) in tokens\.bin is 258, .* vocabulary of 258; .*"):
        rows.read(plans[1])


def test_a_document_larger_than_the_memory_it_takes_is_tokenized_to_disk(tmp_path):
    with (tmp_path / "large.txt").open("w") as file:
        for _ in range(32):
            file.write("a line of a text that is one document of 32 MiB\n" * (2**20 // 48))
    script = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from lockstep.data import ByteTokenizer, TextEncoder, TextSource, open_token_folder, write_token_folder\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10\n"
        "before, folder = peak(), Path(sys.argv[1])\n"
        "write_token_folder(folder / 'tokens', TextSource(str(folder / 'large.txt')), TextEncoder(ByteTokenizer()))\n"
        "print(len(open_token_folder(folder / 'tokens').tokens), peak() - before)\n"
    )
    result = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60)
    tokens, grown = result.stdout.split()
    assert int(tokens) == (tmp_path / "large.txt").stat().st_size + 1
    # A part is 4 Mi characters, whose tokens are held as bytes, int64 and uint16 for a moment: not the 96 MiB of all.
    assert float(grown) < 80


def _tokenize(path, cache, results):
    rows = open_rows([(TextSource(path), 1.0)], ENCODER, DataConfig(cache=cache, workers=0), 64, 0)
    results.put([rows.read(rows.plan()).tokens.tolist() for _ in range(3)])


def test_the_cache_is_written_once_by_one_of_several_processes_and_again_for_other_files(tmp_path):
    path, cache = _jsonl(tmp_path / "a.jsonl"), tmp_path / "cache"
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=_tokenize, args=(str(path), str(cache), results)) for _ in range(3)]
    for process in processes:
        process.start()
    rows = [results.get(timeout=30) for _ in processes]
    assert rows[0] == rows[1] == rows[2]
    (folder,) = (p for p in cache.iterdir() if p.is_dir())
    written = (folder / "tokens.bin").stat().st_mtime_ns
    _tokenize(str(path), str(cache), results)
    assert (folder / "tokens.bin").stat().st_mtime_ns == written
    _jsonl(path, TEXTS[:10])
    _tokenize(str(path), str(cache), results)
    _jsonl(path, TEXTS[9::-1])  # as long as before
    _tokenize(str(path), str(cache), results)
    assert len([p for p in cache.iterdir() if p.is_dir()]) == 3


def test_large_files_go_to_the_users_cache_by_themselves(tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "IN_MEMORY", 100)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    source = TextSource(str(_jsonl(tmp_path / "a.jsonl")))
    documents = opening.open_documents(source, ENCODER, DataConfig())
    assert isinstance(documents.tokens, np.memmap) and (tmp_path / "home" / "lockstep").is_dir()


@pytest.fixture(scope="module")
def data_set(tmp_path_factory):
    """A data set that `datasets` streams from local files."""
    folder = tmp_path_factory.mktemp("data_set")
    _jsonl(folder / "train.jsonl", ["", *TEXTS])
    return f"hf:{folder}"


def _stream_rows(data_set, **changes):
    options = {"shuffle_window": 16, "workers": 0} | changes
    return open_rows([(TextSource(data_set), 1.0)], ENCODER, DataConfig(**options), 50, 7)


def test_a_streamed_data_set_gives_every_document_once_an_epoch_shuffled_by_window(data_set):
    rows = _stream_rows(data_set, repeat=False, packing="whole")
    expected = tokenize_documents(TEXTS, ByteTokenizer())
    seen = []
    while not rows.ended:
        seen += [p.corpus.tokens[p.start : p.stop].tolist() for p in rows.plan()]
    tokens = [t for piece in seen for t in piece]
    assert sorted(tokens) == sorted(expected.tokens.tolist()) and tokens != expected.tokens.tolist()
    assert rows.counts["empty_documents"] == 1
    starts = [re.match(rb"document (\d+):", bytes(t % 256 for t in piece)) for piece in seen]
    numbers = [int(start[1]) for start in starts if start]
    assert numbers != sorted(numbers) and sorted(numbers) == list(range(60))
    # Window k holds the rows from 16 k on, of which the very first is empty.
    assert all((number + 1) // 16 == place // 16 for place, number in enumerate(numbers, start=1))


# In the first window, in the next one, in one that is skipped to, and in the second epoch.
@pytest.mark.parametrize("taken", [0, 3, 17, 30, 60])
def test_a_stream_resumes_to_the_token_in_a_later_epoch_too(data_set, taken):
    rows = _stream_rows(data_set)
    for _ in range(taken):
        rows.plan()
    state = json.loads(json.dumps(rows.state()))
    resumed = _stream_rows(data_set)
    resumed.restore(state)
    for _ in range(8):
        assert np.array_equal(rows.read(rows.plan()).tokens, resumed.read(resumed.plan()).tokens)
    with pytest.raises(UserError, match="shuffle_window: 16 when the run was saved, 8 now"):
        _stream_rows(data_set, shuffle_window=8).restore(state)


def test_bad_rows_of_a_stream_are_named_or_counted(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "one"}\n{"text": null}\n{"text": "two"}\n')
    with pytest.raises(UserError, match="row 2: key 'text' is null, not a text") as refused:
        _stream_rows(f"hf:{tmp_path}")
    assert str(refused.value).count(str(tmp_path)) == 1
    source = TextSource(f"hf:{tmp_path}", skip_bad_lines=True)
    corpus = StreamedDocuments(source, ENCODER, 16, 0).window(0)
    assert len(corpus.offsets) == 3 and corpus.counts["skipped_lines"] == 1


def test_sources_and_weights_as_they_are_written():
    for data, expected in (
        ("a.jsonl=0.7,b.parquet=0.3", [("a.jsonl", 0.7), ("b.parquet", 0.3)]),
        ("a.txt=2, hf:x/y:c:train", [("a.txt", 2.0), ("hf:x/y:c:train", 1.0)]),
        ("odd, name=x.txt", [("odd, name=x.txt", 1.0)]),
        ("", [("", 1.0)]),
    ):
        assert parse_data(data) == expected
    with pytest.raises(UserError, match=r"data 'a=0': write PATH=WEIGHT"):
        parse_data("a=0,b=1")


@settings(max_examples=30)
@given(weights=st.lists(st.floats(0.05, 1.0), min_size=2, max_size=4), taken=st.integers(0, 100), repeat=st.booleans())
def test_a_mixture_keeps_its_proportions_and_resumes(weights, taken, repeat):
    def mixture():
        tokens = np.arange(200)
        corpora = [TokenizedCorpus(tokens + 1000 * i, np.arange(0, 201, 10)) for i in range(len(weights))]
        return MixedRows([Rows(c, 8, 3, repeat=repeat) for c in corpora], weights)

    rows, given_rows = mixture(), [0] * len(weights)
    for number in range(1, taken + 1):
        if rows.ended:
            break
        given_rows[rows.read(rows.plan()).tokens[0] // 1000] += 1
        if repeat:
            shares = [w / sum(weights) * number for w in weights]
            # Never further than one row for each of the streams that one competes with.
            assert all(abs(g - s) < len(weights) for g, s in zip(given_rows, shares))
    resumed, state = mixture(), rows.state()
    saved = json.dumps(state)
    resumed.restore(json.loads(saved))
    for _ in range(5):
        assert np.array_equal(resumed.read(resumed.plan()).tokens, rows.read(rows.plan()).tokens)
    # A checkpoint is written while the rows go on.
    assert json.dumps(state) == saved
    if not repeat:
        while not rows.ended:
            given_rows[rows.read(rows.plan()).tokens[0] // 1000] += 1
    with pytest.raises(UserError, match="weights of the data"):
        MixedRows(rows.streams, [w + 1 + i for i, w in enumerate(weights)]).restore(rows.state())


@pytest.mark.parametrize("weights", [[0.5, 0.5], [0.2, 0.8], [0.7, 0.3]])
def test_the_shares_of_a_mixture_are_those_of_its_tokens_however_full_the_rows_are(weights):
    # Of the first source two documents fill a row of 64; of the second one document leaves nearly half of it empty.
    corpora = [TokenizedCorpus(np.arange(n * 20) % n, np.arange(0, n * 20 + 1, n)) for n in (32, 35)]
    rows = MixedRows([Rows(c, 64, 0, packing="whole") for c in corpora], weights)
    tokens = [0, 0]
    for _ in range(200):
        for piece in rows.plan():
            tokens[0 if piece.corpus is corpora[0] else 1] += piece.stop - piece.start
    assert all(abs(t - w * sum(tokens)) <= 64 for t, w in zip(tokens, weights)), tokens


def test_nothing_of_a_mixture_is_lost_where_a_source_ends_before_another():
    corpora = [TokenizedCorpus(np.arange(1, n) + 1000 * i, np.array([0, n - 1])) for i, n in enumerate((20, 90))]
    rows = MixedRows([Rows(c, 8, 0, repeat=False) for c in corpora], [0.9, 0.1])
    seen = []
    while not rows.ended:
        row = rows.read(rows.plan())
        seen += row.tokens[row.tokens > 0].tolist()
    assert sorted(seen) == [*range(1, 20), *range(1001, 1090)]


def test_a_run_on_a_mixture_of_a_stream_text_and_tokens(tmp_path, data_set):
    (tmp_path / "a.txt").write_text("plain text. " * 100)
    source = TextSource(str(_jsonl(tmp_path / "b.jsonl")))
    write_token_folder(tmp_path / "tokens", source, ENCODER)
    mixture = f"{tmp_path / 'a.txt'}=0.5,{tmp_path / 'tokens'}=0.25,{data_set}=0.25"
    config = PretrainConfig(
        output=str(tmp_path / "run"), model="qwen3:micro", data=mixture, steps=1, tokens_per_step=512,
        sequence_length=64, loader=DataConfig(cache=str(tmp_path / "cache"), workers=0, shuffle_window=16),
    )  # fmt: skip
    metrics = [json.loads(line) for line in (pretrain(config) / "metrics.jsonl").read_text().splitlines()]
    assert [m["tokens"] for m in metrics] == [512] and metrics[0]["data/empty_documents"] == 1
    config.data, config.overwrite, config.tokenizer = str(tmp_path / "tokens"), True, "bpe:300"
    with pytest.raises(UserError, match="tokenized already"):
        pretrain(config)


def test_the_command_line_tokenizes_and_a_run_goes_on_from_there(tmp_path, capsys):
    data = str(_jsonl(tmp_path / "a.jsonl", ["", *TEXTS]))
    arguments = ["--data", data, "--tokenizer", "bpe:300", "--output", str(tmp_path / "tokens")]
    assert main(["data", "tokenize", "--workers", "1", *arguments]) == 0
    assert "60 documents" in (printed := capsys.readouterr().out) and "1 empty documents" in printed
    arguments = ["--data", str(tmp_path / "tokens"), "--model", "qwen3:micro", "--output", str(tmp_path / "run")]
    arguments += ["--steps", "1", "--sequence-length", "64", "--tokens-per-step", "256"]
    assert main(["pretrain", *arguments]) == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000001"
    assert load_tokenizer(checkpoint).encode("word") == load_tokenizer(tmp_path / "tokens").encode("word")
    assert main(["data"]) == 2 and "lockstep data tokenize" in capsys.readouterr().err
