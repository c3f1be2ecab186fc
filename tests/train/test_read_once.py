"""Rank 0 reads the data and every rank trains on it: what its folder holds, the other rank's lacks or has otherwise."""

import json
import os
import sys

import pytest

from lockstep.config import CheckpointConfig, DataConfig, ParallelConfig, PretrainConfig, TrainConfig
from lockstep.errors import UserError
from lockstep.observe import read_metrics
from lockstep.train.pretrain import pretrain
from tests.parallel.launch import launch

# 512 documents are tokenized together, and the run shall have begun when it meets one that is bad.
TEXTS = [f"{i % 10}{i % 7}" for i in range(600)]
BAD = 540


@pytest.fixture
def folders(tmp_path):
    """Each rank's working folder; a run in one process works in the first."""
    for rank in range(2):
        (tmp_path / f"rank_{rank}").mkdir()
    (tmp_path / "rank_0" / "stream").mkdir()
    return tmp_path


def _write(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def _config(folders, name, **changes):
    defaults = dict(
        output=str(folders / name), model="qwen3:micro", data="hf:stream", tokens_per_step=256, sequence_length=64,
        steps=8, dtype="float32", train=TrainConfig(tokens_per_microbatch=128),
        loader=DataConfig(shuffle_window=64, workers=0), checkpoint=CheckpointConfig(every=4),
    )  # fmt: skip
    return PretrainConfig(**(defaults | changes))


def _train_in_own_folder(config, folders):
    """Why the run ended early, if it did, and whether this rank could have read a stream."""
    os.chdir(folders / f"rank_{os.environ['RANK']}")
    try:
        pretrain(config)
        message = ""
    except UserError as error:
        message = str(error)
    return message, "datasets" in sys.modules


def _metrics(folders, name, *keys):
    return [[m.get(key) for key in keys] for m in read_metrics(folders / name / "metrics.jsonl")]


def _assert_same_losses(folders, ranks, alone):
    for both, one in zip(_metrics(folders, ranks, "loss"), _metrics(folders, alone, "loss"), strict=True):
        # Gradients of two ranks are added in another order.
        assert both == pytest.approx(one, rel=1e-5)


@pytest.mark.slow
def test_a_stream_ends_all_ranks_at_a_bad_row_and_once_mended_they_resume_to_what_one_rank_computes(
    folders, monkeypatch
):
    rows = folders / "rank_0" / "stream" / "train.jsonl"
    _write(rows, [*TEXTS[:BAD], None, *TEXTS[BAD + 1 :]])
    message = f"hf:stream: row {BAD + 1}: key 'text' is not a string"
    (first, read), (second, other_read) = launch(2, _train_in_own_folder, _config(folders, "two"), folders)
    assert first.startswith(message) and second == first and (read, other_read) == (True, False)
    assert _metrics(folders, "two", "step")[-1] == [5]

    _write(rows, TEXTS)
    # Whatever the ranks share, they ask for the same windows.
    config = _config(folders, "two", resume=True, parallel=ParallelConfig(pipeline=2))
    ended = launch(2, _train_in_own_folder, config, folders)
    assert ended == [("", True), ("", False)]
    monkeypatch.chdir(folders / "rank_0")
    pretrain(_config(folders, "one"))
    _assert_same_losses(folders, "two", "one")
    assert _metrics(folders, "two", "tokens", "epoch") == _metrics(folders, "one", "tokens", "epoch")
    assert _metrics(folders, "one", "epoch")[-1] == [1.0], "the stream's second epoch is in it"


def test_files_are_tokenized_and_a_vocabulary_is_learnt_from_those_of_rank_0(folders, monkeypatch):
    _write(folders / "rank_0" / "text.jsonl", TEXTS)
    _write(folders / "rank_0" / "held_out.jsonl", TEXTS[::-2])
    for name in ("text", "held_out"):
        _write(folders / "rank_1" / f"{name}.jsonl", ["something else"])
    config = dict(data="text.jsonl", validation_data="held_out.jsonl", tokenizer="bpe:300", steps=2)
    assert launch(2, _train_in_own_folder, _config(folders, "two", **config), folders) == [("", False)] * 2
    monkeypatch.chdir(folders / "rank_0")
    pretrain(_config(folders, "one", **config))
    _assert_same_losses(folders, "two", "one")
    (one,), (two,) = (_metrics(folders, name, "validation/loss")[-1] for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-5)
    one, two = (folders / name / "checkpoints" / "step_00000002" for name in ("one", "two"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (two / name).read_text() == (one / name).read_text()
