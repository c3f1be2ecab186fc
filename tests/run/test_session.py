"""What a run saves, and when."""

import time

import pytest

from lockstep.checkpoint.folders import checkpoints_in
from lockstep.config import CheckpointConfig, PretrainConfig, TrainConfig
from lockstep.train.pretrain import pretrain
from lockstep.train.trainer import Trainer


@pytest.mark.parametrize(("minutes", "saved"), [(0.0, [4]), (0.02, [2, 4])])
def test_a_checkpoint_is_written_once_so_many_minutes_have_passed(tmp_path, monkeypatch, minutes, saved):
    exact = Trainer.step

    def slow_second(trainer, *arguments):
        if trainer.updates == 1:
            time.sleep(1.3)
        return exact(trainer, *arguments)

    monkeypatch.setattr(Trainer, "step", slow_second)
    config = PretrainConfig(
        output=str(tmp_path / "run"), model="qwen3:micro", tokens_per_step=64, sequence_length=64, steps=4,
        dtype="float32", train=TrainConfig(warmup_steps=0), checkpoint=CheckpointConfig(every_minutes=minutes),
    )  # fmt: skip
    run = pretrain(config, ["the quick brown fox jumps over the lazy dog " * 20])
    assert sorted(int(path.name.removeprefix("step_")) for path in checkpoints_in(run / "checkpoints")) == saved
