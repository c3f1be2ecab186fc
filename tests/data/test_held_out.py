"""`validation_share`: the same documents are held out every time, and none is trained on."""

import json
from dataclasses import replace

import numpy as np
import pytest

from lockstep.cli import main
from lockstep.config import DataConfig
from lockstep.data import ByteTokenizer, TextEncoder, TextSource, divide, open_rows, tokenize_documents
from lockstep.errors import UserError
from lockstep.observe import read_metrics
from lockstep.train.pretrain import pretrain
from tests.train.runs import text_run

ENCODER = TextEncoder(ByteTokenizer())
TEXTS = [f"document {i}: " + "word " * (i % 7) for i in range(60)]


def _documents(sources, seed=0):
    rows = open_rows(sources, ENCODER, DataConfig(packing="whole", repeat=False), 64, seed)
    found = []
    while not rows.ended:
        found += [bytes(p.corpus.tokens[p.start : p.stop - 1].astype(np.uint8)).decode() for p in rows.plan()]
    return found


@pytest.mark.parametrize("share", [0.001, 0.05, 0.5])
def test_every_document_is_either_trained_on_or_held_out(tmp_path, share):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    parts = divide([(TextSource(str(tmp_path / "a.jsonl")), 1.0)], share)
    training, held_out = (_documents(part) for part in parts)
    assert len(held_out) == max(1, round(share * 60)) and sorted(training + held_out) == sorted(TEXTS)
    again = divide([(tokenize_documents(TEXTS, ByteTokenizer()), 1.0)], share)
    assert sorted(_documents(again[1], seed=9)) == sorted(held_out), "whatever the run's seed"


def test_what_cannot_be_divided_is_refused(tmp_path):
    (tmp_path / "one.txt").write_text("one long text " * 50)
    config = text_run(tmp_path, data=str(tmp_path / "one.txt"), validation_share=0.1)
    with pytest.raises(UserError, match="one.txt: has 1 document, of which validation_share 0.1 leaves none"):
        pretrain(config)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text('{"text": "one"}\n' * 30)
    with pytest.raises(UserError, match="validation_share needs data of known length, but this is streamed"):
        pretrain(replace(config, data=f"hf:{tmp_path / 'set'}"))
    with pytest.raises(UserError, match="validation_data and validation_share exclude each other"):
        pretrain(replace(config, validation_data=str(tmp_path / "one.txt")))


def test_a_run_validates_on_its_share_and_resumes_with_the_same_bits(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    settings = dict(tokens_per_step=64, sequence_length=32, validation_share=0.1, validation_every=2)
    config = text_run(tmp_path, data=str(tmp_path / "a.jsonl"), **settings)
    whole = read_metrics(pretrain(config) / "metrics.jsonl")
    assert all("validation/loss" in line for line in (whole[1], whole[3]))
    cut = replace(config, output=str(tmp_path / "cut"), steps=2)
    pretrain(cut)
    resumed = read_metrics(pretrain(replace(cut, steps=4, resume=True)) / "metrics.jsonl")
    names = ("loss", "validation/loss")
    assert [[line.get(n) for n in names] for line in resumed[2:]] == [
        [line.get(n) for n in names] for line in whole[2:]
    ]
    said = "documents in use: 54 when the run was saved, 48 now; resume with the same data, validation_share"
    with pytest.raises(UserError, match=said):
        pretrain(replace(cut, steps=5, resume=True, validation_share=0.2))


@pytest.mark.parametrize("command", ["sft", "dpo", pytest.param("reward-model", marks=pytest.mark.slow)])
def test_runs_over_examples_do_not_train_on_their_share(tmp_path, model_folder, command):
    """Another share holds out others: a run that trained on all of them would not notice."""
    both = {"completion": " yes"} if command == "sft" else {"chosen": " yes", "rejected": " no"}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"prompt": f"is it {n}?", **both}) + "\n" for n in range(20)))
    options = ["--model", str(model_folder), "--data", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "run")]
    options += ["--tokens-per-step", "128", "--sequence-length", "128", "--device", "cpu"]
    assert main([command, *options, "--steps", "1", "--validation-share", "0.2"]) == 0
    (line,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert "validation/loss" in line
    more = ["--resume", "--output", str(tmp_path / "run"), "--steps", "2"]
    assert main([command, *more, "--validation-share", "0.3"]) == 2
    assert main([command, *more]) == 0
