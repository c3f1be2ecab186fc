"""Rank 0 reads the data and every rank trains on it: what its folder holds, the other rank's lacks or has otherwise."""

import os
import sys

import pytest

from lockstep.config import CheckpointConfig, DataConfig, ParallelConfig, PretrainConfig, TrainConfig
from lockstep.errors import UserError
from lockstep.train.pretrain import pretrain
from tests.parallel.launch import launch
from tests.train.runs import logged, write_lines

# 512 documents are tokenized together, and the run shall have begun when it meets one that is bad.
TEXTS = [{"text": f"{i % 10}{i % 7}"} for i in range(600)]
BAD = 540


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Each rank's working folder; a run in one process works in the first."""
    (tmp_path / "rank_0" / "stream").mkdir(parents=True)
    (tmp_path / "rank_1").mkdir()
    monkeypatch.chdir(tmp_path / "rank_0")
    return tmp_path


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


@pytest.mark.slow
def test_a_stream_ends_all_ranks_at_a_bad_row_and_once_mended_they_resume_to_what_one_rank_computes(folders):
    rows = folders / "rank_0" / "stream" / "train.jsonl"
    write_lines(rows, [*TEXTS[:BAD], {"text": None}, *TEXTS[BAD + 1 :]])
    (first, read), (second, other_read) = launch(2, _train_in_own_folder, _config(folders, "two"), folders)
    assert first.startswith(f"hf:stream: row {BAD + 1}: key 'text' is null, not a text")
    assert second == first and (read, other_read) == (True, False)
    assert logged(folders / "two", "step")[-1] == 5
    write_lines(rows, TEXTS)
    # Whatever the ranks share, they ask for the same windows.
    config = _config(folders, "two", resume=True, parallel=ParallelConfig(pipeline=2))
    assert launch(2, _train_in_own_folder, config, folders) == [("", True), ("", False)]
    one = pretrain(_config(folders, "one"))
    # Gradients of two ranks are added in another order.
    assert logged(folders / "two") == pytest.approx(logged(one), rel=1e-5)
    for name in ("tokens", "epoch"):
        assert logged(folders / "two", name) == logged(one, name)
    assert logged(one, "epoch")[-1] == 1.0, "the stream's second epoch is in it"


def test_files_are_tokenized_and_a_vocabulary_is_learned_from_those_of_rank_0(folders):
    for name, texts in (("text", TEXTS), ("held_out", TEXTS[::-2])):
        write_lines(folders / "rank_0" / f"{name}.jsonl", texts)
        write_lines(folders / "rank_1" / f"{name}.jsonl", [{"text": "something else"}])
    config = dict(data="text.jsonl", validation_data="held_out.jsonl", tokenizer="bpe:300", steps=2)
    assert launch(2, _train_in_own_folder, _config(folders, "two", **config), folders) == [("", False)] * 2
    one, two = pretrain(_config(folders, "one", **config)), folders / "two"
    assert logged(two) == pytest.approx(logged(one), rel=1e-5)
    assert logged(two, "validation/loss")[-1] == pytest.approx(logged(one, "validation/loss")[-1], rel=1e-5)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        one_file, two_file = (run / "checkpoints" / "step_00000002" / name for run in (one, two))
        assert two_file.read_text() == one_file.read_text()
