"""Validation: the same loss for any number of ranks, and no trace of it in the training."""

import json

import pytest

from lockstep.config import FaultConfig, TrainConfig
from lockstep.errors import UserError
from lockstep.observe import read_metrics
from lockstep.train.pretrain import pretrain
from tests.parallel.launch import launch
from tests.train.runs import text_run


def _config(tmp_path, name, **changes):
    (tmp_path / "held_out.txt").write_text("a lazy fox. " * 50)
    return text_run(tmp_path, name, **(dict(steps=3, train=TrainConfig(tokens_per_microbatch=128)) | changes))


def test_validation_leaves_training_alone_and_is_shared_by_ranks(tmp_path, capsys):
    held_out = dict(validation_data=str(tmp_path / "held_out.txt"), validation_every=2, validation_tokens=512)
    plain = read_metrics(pretrain(_config(tmp_path, "plain")) / "metrics.jsonl")
    alone = read_metrics(pretrain(_config(tmp_path, "alone", **held_out)) / "metrics.jsonl")
    printed = [line for line in capsys.readouterr().out.splitlines() if "validation" in line]
    losses = [(m["step"], m["validation/loss"]) for m in alone if "validation/loss" in m]
    assert printed == [f"pretrain: validation after step {step}: loss {loss:.4g}" for step, loss in losses]
    (run, _) = launch(2, pretrain, _config(tmp_path, "two", faults=FaultConfig(watchdog_seconds=60), **held_out))
    two = read_metrics(run / "metrics.jsonl")
    assert [m["loss"] for m in alone] == [m["loss"] for m in plain]
    assert [step for step, _ in losses] == [2, 3]
    for one, both in zip(alone, two, strict=True):
        # Gradients of two ranks are added in another order.
        assert both["loss"] == pytest.approx(one["loss"], rel=1e-5)
        if "validation/loss" in one:
            assert both["validation/loss"] == pytest.approx(one["validation/loss"], rel=1e-5)
        # A step's work is the same, whoever did it.
        assert both["tflops"] * both["time/step"] == pytest.approx(one["tflops"] * one["time/step"])
    for name in ("memory_gib", "learning_rate", "grad_norm", "time/data", "time/forward", "time/backward"):
        assert two[-1][name] > 0
    assert json.loads((run / "summary.json").read_text())["validation_loss"] == two[-1]["validation/loss"]
    assert (run / "logs" / "rank_0.log").is_file() and (run / "logs" / "rank_1.log").is_file()
    events = json.loads((run / "timeline.json").read_text())["traceEvents"]
    phases = {(e["pid"], e["name"]) for e in events if e["ph"] == "X"}
    expected = {"data", "forward", "backward", "optimizer", "validation", "checkpoint"}
    assert phases == {(rank, name) for rank in (0, 1) for name in expected}
    assert "validation loss" in (run / "report.html").read_text()


def test_validation_data_without_a_target_is_refused_before_the_run_begins(tmp_path):
    config = _config(tmp_path, "run", validation_data=str(tmp_path / "empty.txt"))
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(UserError, match="no text"):
        pretrain(config)
    assert not (tmp_path / "run").exists()
