"""What a run saves, and when."""

import time

import pytest

from lockstep.checkpoint.folders import checkpoints_in
from lockstep.config import CheckpointConfig
from lockstep.train.pretrain import pretrain
from tests.train.runs import text_run


@pytest.mark.parametrize(("minutes", "saved"), [(0.0, [4]), (0.02, [2, 4])])
def test_a_checkpoint_is_written_once_so_many_minutes_have_passed(tmp_path, minutes, saved):
    config = text_run(tmp_path, tokens_per_step=64, checkpoint=CheckpointConfig(every_minutes=minutes))
    run = pretrain(config, on_metrics=lambda step, metrics: time.sleep(1.3 if step == 2 else 0))
    assert sorted(int(path.name.removeprefix("step_")) for path in checkpoints_in(run / "checkpoints")) == saved
