"""What a run does when something goes wrong: bad numbers, spikes, signals, ranks that stop."""

import json
import os
import signal
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from lockstep.checkpoint import newest_checkpoint
from lockstep.config import CheckpointConfig, CompileConfig, FaultConfig, ParallelConfig, TrainConfig
from lockstep.errors import RunStopped
from lockstep.model import build_model, initialize, preset
from lockstep.observe import read_metrics
from lockstep.parallel import close_world, open_world, parallel_model
from lockstep.train import Trainer, pack
from lockstep.train.faults import LossSpikes
from lockstep.train.objective import NextTokenLoss
from lockstep.train.pretrain import pretrain
from tests.parallel.launch import launch
from tests.train.runs import TEXT, logged, text_run


def _skip(dtype, poison, poisoned_rank, settings):
    """A good step, a bad one, a good one; and the same without the bad one."""
    parallel = ParallelConfig()
    world = open_world(parallel, "cpu")
    kind = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    good = NextTokenLoss(20 * world.size)
    row = pack([list(range(1 + world.rank, 22 + world.rank))])

    def bad(model, row):
        loss = good(model, row)
        if world.rank != poisoned_rank:
            return loss
        # An infinite gradient under a finite loss: that of a square root at 0.
        return loss * float("nan") if poison == "loss" else loss + ((loss - loss.detach()) * 0).sqrt()

    def tensors():
        held = [*trainer.optimizer.state_tensors().values(), *trainer.model.parameters()]
        return [(t.to_local() if hasattr(t, "to_local") else t).detach().clone() for t in held]

    ends = []
    for losses in ((good, bad, good), (good, good)):
        fill = partial(initialize, seed=0)
        model = parallel_model(preset("qwen3:micro"), kind, world, parallel, CompileConfig(), fill)
        trainer = Trainer(model, TrainConfig(warmup_steps=0, **settings), 3, world)
        for loss in losses:
            before = tensors()
            metrics = trainer.step([row], loss)
            if loss is bad:
                assert metrics["skipped_steps"] == 1 and trainer.updates == 1
                assert all(torch.equal(a, b) for a, b in zip(before, tensors(), strict=True))
        ends.append((metrics, tensors()))
    close_world(world)
    return ends


IN_BACKWARD = dict(optimizer_in_backward=True, max_grad_norm=0.0)
BAD_STEPS = [(1, "float32", "gradient", {}), (1, "bfloat16", "loss", {}), (1, "float32", "loss", IN_BACKWARD)]
MORE = [
    *((1, "float32", "loss", {}), (1, "bfloat16", "gradient", {}), (2, "float32", "loss", {})),
    *((2, "float32", "gradient", {}), (2, "float32", "loss", IN_BACKWARD)),
]


@pytest.mark.parametrize(
    ("ranks", "dtype", "poison", "settings"),
    [*BAD_STEPS, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
def test_a_step_that_is_not_finite_changes_no_bit_on_any_rank(ranks, dtype, poison, settings):
    for (skipped, after), (never, expected) in launch(ranks, _skip, dtype, poison, ranks - 1, settings):
        assert skipped["skipped_steps"] == 1 and never["skipped_steps"] == 0
        assert skipped["loss"] == never["loss"] and skipped["grad_norm"] == never["grad_norm"]
        assert all(torch.equal(a, b) for a, b in zip(after, expected, strict=True))


def test_a_bad_gradient_ends_a_run_whose_updates_are_in_the_backward():
    trainer = Trainer(build_model(preset("qwen3:micro")), TrainConfig(warmup_steps=0, **IN_BACKWARD), 3)

    def bad(model, row):
        return NextTokenLoss(20)(model, row) + (model.norm.weight[0] * 0).sqrt()

    with pytest.raises(RunStopped, match="the step cannot be skipped and the run ends. --resume goes back"):
        trainer.step([pack([list(range(1, 22))])], bad)


def _config(tmp_path, **changes):
    train = TrainConfig(learning_rate=3e-3, warmup_steps=0, schedule="constant")
    return text_run(tmp_path, repeats=300, **(dict(steps=6, train=train) | changes))


def test_too_many_bad_steps_in_a_row_end_the_run_and_keep_the_data(tmp_path):
    # Weights of 1e30 make every loss from the second step on infinite or NaN.
    config = _config(tmp_path, steps=50, faults=FaultConfig(max_skipped_steps=2))
    config.train.learning_rate = 1e30
    with pytest.raises(RunStopped, match="step 4: .* in a row: 3") as stopped:
        pretrain(config)
    assert stopped.value.exit_code == 1
    run = tmp_path / "run"
    assert logged(run, "skipped_steps") == [0, 1, 2]
    kept = sorted((run / "bad_batches").glob("*.jsonl"))
    assert [path.name for path in kept] == [f"step_{s:08}_rank_0.jsonl" for s in (2, 3, 4)]
    rows = [json.loads(line) for line in kept[0].read_text().splitlines()]
    assert [len(row["tokens"]) for row in rows] == [64] * 4 and all("quick brown" in row["text"] for row in rows)


@pytest.mark.slow
def test_a_spike_goes_back_to_a_checkpoint_and_on_with_later_data(tmp_path, caplog):
    documents = [TEXT[: 40 + i % 5] * 6 for i in range(400)]
    documents[250:262] = ["".join(chr(33 + (7 * i * j * j + i) % 90) for i in range(260)) for j in range(1, 13)]
    faults = FaultConfig(spike_deviations=4.0, on_spike="rollback")
    run = pretrain(_config(tmp_path, steps=60, checkpoint=CheckpointConfig(every=10), faults=faults), documents)
    messages = [r.getMessage() for r in caplog.records]
    assert any("loss spike of" in m for m in messages)
    assert any("continuing with the data after the spike" in m for m in messages)
    metrics = read_metrics(run / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(1, 61))
    totals = [sum(m["tokens"] for m in metrics[: index + 1]) for index in range(60)]
    assert [m["tokens/total"] for m in metrics] == totals, "steps that were rewound do not count"
    # Whole steps of data were passed over: those from the checkpoint to the spike.
    assert metrics[-1]["epoch"] > 61 * metrics[0]["epoch"]


def test_a_resumed_run_compares_losses_with_those_before_it(tmp_path):
    before, after = (LossSpikes(FaultConfig(spike_deviations=4.0)) for _ in range(2))
    assert not any(before.is_spike(step, 3.0 + 0.1 * (step % 2)) for step in range(30))
    assert not after.is_spike(30, 9.0)
    after.restore(json.loads(json.dumps(before.state())))
    assert before.is_spike(30, 9.0) and after.is_spike(30, 9.0)
    config = _config(tmp_path, steps=2, tokens_per_step=64, faults=FaultConfig(spike_deviations=9.0))
    losses = logged(pretrain(config))
    state = json.loads((newest_checkpoint(tmp_path / "run") / "state.json").read_text())
    assert state["losses"] == losses


def _signalled(config, rank, number):
    """A run in which one rank gets a signal once two steps are made: its error."""
    path = Path(config.output) / "metrics.jsonl"

    def send():
        while len(read_metrics(path)) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    if int(os.environ["RANK"]) == rank:
        threading.Thread(target=send, daemon=True).start()
    with pytest.raises(RunStopped) as error:
        pretrain(config)
    return error.value.exit_code, str(error.value)


@pytest.mark.parametrize("ranks, number", [pytest.param(1, signal.SIGINT, marks=pytest.mark.slow), (2, signal.SIGTERM)])
def test_a_signal_to_one_rank_saves_and_ends_all_of_them_at_one_step(tmp_path, ranks, number):
    config = _config(tmp_path, steps=100_000)
    ends = launch(ranks, _signalled, config, ranks - 1, number)
    assert [code for code, _ in ends] == [128 + number] * ranks
    run = tmp_path / "run"
    last = read_metrics(run / "metrics.jsonl")[-1]["step"]
    assert f"{signal.Signals(number).name} ended the run after step {last}, which is saved" in ends[0][1]
    assert newest_checkpoint(run).name == f"step_{last:08}"
    assert (run / "report.html").is_file() and (run / "timeline.json").is_file()
    # One process goes on from there, whatever the number of ranks was.
    pretrain(replace(config, steps=last + 1, resume=True))
    assert read_metrics(run / "metrics.jsonl")[-1]["step"] == last + 1


def _end_in_a_validation(config, step):
    """A run whose rank 0 gets a signal in the middle of the validation after `step`."""
    evaluate = Trainer.evaluate

    def interrupted(self, microbatches, loss_of):
        counted = []

        def loss(model, row):
            counted.append(1)
            assert len(counted) <= 2, "the validation went on"
            if len(counted) == 2 and self.world.rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            return loss_of(model, row)

        return evaluate(self, microbatches, loss if self.updates == step else loss_of)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RunStopped) as error:
        patch.setattr(Trainer, "evaluate", interrupted)
        pretrain(config)
    assert error.value.exit_code == 143
    assert f"SIGTERM ended the run after step {step}, which is saved" in str(error.value)


@pytest.mark.parametrize(("ranks", "step"), [(1, 2), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_a_signal_ends_a_validation_and_a_resumed_run_begins_with_it(tmp_path, ranks, step, caplog):
    train = TrainConfig(warmup_steps=0, tokens_per_microbatch=64)
    config = _config(
        tmp_path, steps=2, tokens_per_step=128, train=train, faults=FaultConfig(spike_deviations=1000.0),
        validation_every=1, validation_data=str(tmp_path / "text.txt"), validation_tokens=2048,
    )  # fmt: skip
    launch(ranks, _end_in_a_validation, config, step, fresh=True)
    run, whole = tmp_path / "run", tmp_path / "whole"
    last = read_metrics(run / "metrics.jsonl")[-1]
    assert last["step"] == step and "loss" in last and "validation/loss" not in last
    launch(ranks, pretrain, replace(config, resume=True))
    launch(ranks, pretrain, replace(config, output=str(whole)))
    for name in ("step", "loss", "tokens/total", "validation/loss"):
        assert logged(run, name) == logged(whole, name) and len(logged(run, name)) == 2
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (run, whole)]
    assert summaries[0] | {"seconds": 0} == summaries[1] | {"seconds": 0, "resumed_from": step}
    losses = [json.loads((f / "checkpoints/step_00000002/state.json").read_text())["losses"] for f in (run, whole)]
    assert losses[0] == losses[1] and len(losses[1]) == 2, "a validation that is made up is no new step"
    pretrain(replace(config, resume=True))
    assert "the run has finished at step 2" in caplog.text
