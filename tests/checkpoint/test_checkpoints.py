"""A checkpoint is whole or it is not one: damage is named, an older one is used, a full disk stops nothing."""

import json
import shutil

import pytest
import torch

from lockstep.checkpoint import checkpoints_in, newest_checkpoint
from lockstep.checkpoint.manifest import damage
from lockstep.config import CheckpointConfig, DataConfig, ParallelConfig, TrainConfig
from lockstep.errors import UserError
from lockstep.parallel import World, close_world, open_world
from lockstep.train.pretrain import pretrain
from tests.checkpoint.runs import checkpoints_of, equal, files_of_at_most, full_disk, trainer_of, update, whole
from tests.parallel.launch import launch
from tests.train.runs import text_run

WORLD = World(torch.device("cpu"))


@pytest.fixture
def trainer():
    return trainer_of(WORLD, ParallelConfig(), "float32", seed=3)


def test_what_happens_after_a_save_was_called_is_not_in_it(tmp_path, trainer):
    update(trainer)
    held, drawn = whole(trainer), torch.random.get_rng_state()
    with checkpoints_of(tmp_path, trainer) as checkpoints:
        checkpoints.save(1, {})
        update(trainer)
        torch.rand(3)
    assert not equal(whole(trainer), held)
    checkpoints.resume()
    assert equal(whole(trainer), held) and torch.equal(torch.random.get_rng_state(), drawn)


def test_a_resumed_run_that_comes_to_a_step_again_saves_what_it_has_then(tmp_path, trainer):
    checkpoints = checkpoints_of(tmp_path, trainer)
    for updates in (1, 2):
        update(trainer)
        checkpoints.save(updates, {})
    checkpoints.wait()
    (tmp_path / "checkpoints" / "step_00000002").rename(tmp_path / "2")
    assert checkpoints.resume()["step"] == 1
    update(trainer), update(trainer)
    checkpoints.save(2, {})
    checkpoints.wait()
    held = whole(trainer)
    update(trainer)
    assert checkpoints.resume()["updates"] == 3 and equal(whole(trainer), held)


def test_the_last_save_is_on_disk_when_it_returns(tmp_path, trainer):
    update(trainer)
    held = whole(trainer)
    checkpoints = checkpoints_of(tmp_path, trainer)
    checkpoints.save(2, {}, last=True)
    assert [p.name for p in checkpoints_in(tmp_path / "checkpoints")] == ["step_00000002"]
    update(trainer)
    checkpoints.resume()
    assert equal(whole(trainer), held)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_full_disk_leaves_the_run_going_and_the_earlier_checkpoint_whole(tmp_path, ranks):
    for said in launch(2, full_disk, tmp_path) if ranks == 2 else [full_disk(tmp_path)]:
        assert said[0] == said[2] == "" and "step_00000002" in said[1] and "File too large" in said[1]
        assert "step_00000004" in said[3]
    assert [p.name for p in checkpoints_in(tmp_path / "checkpoints")] == ["step_00000003", "step_00000001"]
    (tmp_path / "checkpoints" / "step_00000004.partial").unlink()
    assert not list((tmp_path / "checkpoints").glob("*.partial"))
    assert not any(damage(p) for p in checkpoints_in(tmp_path / "checkpoints"))


def _config(tmp_path, **changes):
    settings = dict(tokens_per_step=128, sequence_length=32, steps=3, train=TrainConfig(tokens_per_microbatch=64))
    return text_run(tmp_path, repeats=14, **(settings | changes))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a run of one step."""
    folder = tmp_path_factory.mktemp("trained")
    pretrain(_config(folder, steps=1))
    return folder


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run"


def test_a_run_whose_last_checkpoint_failed_says_so_at_its_end(tmp_path, caplog):
    config = _config(tmp_path, checkpoint=CheckpointConfig(every=1))
    message = "last checkpoint could not be written: step_00000003.*--resume"
    with files_of_at_most(10**6), pytest.raises(UserError, match=message):
        pretrain(config)
    warned = [message for message in caplog.messages if "CHECKPOINT" in message]
    assert len(warned) == 3 and "CHECKPOINT NOT WRITTEN: step_00000001" in warned[0]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3


def test_the_last_and_every_nth_are_kept(tmp_path, trainer):
    checkpoints = checkpoints_of(tmp_path, trainer, keep_last=2, keep_every=3)
    for step in range(1, 9):
        checkpoints.save(step, {})
    checkpoints.wait()
    assert [int(p.name[-2:]) for p in checkpoints_in(tmp_path / "checkpoints")] == [8, 7, 6, 3]


def test_later_checkpoints_that_cannot_be_resumed_push_out_none_that_can(tmp_path, trainer):
    checkpoints = checkpoints_of(tmp_path, trainer, keep_last=1, asynchronous=False)
    checkpoints.save(4, {})
    (tmp_path / "checkpoints" / "step_00000009").mkdir()
    checkpoints.save(5, {})
    assert [int(p.name[-2:]) for p in checkpoints_in(tmp_path / "checkpoints")] == [9, 5]
    checkpoints.save(10, {})
    assert [int(p.name[-2:]) for p in checkpoints_in(tmp_path / "checkpoints")] == [10]


def test_the_last_checkpoint_can_be_the_model_alone_in_another_dtype(tmp_path, caplog):
    changes = dict(checkpoint=CheckpointConfig(every=2, last_model_only=True, last_dtype="bfloat16"))
    run = pretrain(_config(tmp_path, **changes))
    last = newest_checkpoint(run)
    assert last.name == "step_00000003" and not (last / "trainer").exists()
    assert json.loads((last / "config.json").read_text())["dtype"] == "bfloat16"
    losses = (run / "metrics.jsonl").read_text().splitlines()
    pretrain(_config(tmp_path, resume=True, **changes))
    assert (run / "metrics.jsonl").read_text().splitlines() == losses and "finished at step 3" in caplog.text
    pretrain(_config(tmp_path, resume=True, steps=4, **changes))
    assert "step_00000003 cannot be resumed from: it contains only the model" in caplog.text
    again = (run / "metrics.jsonl").read_text().splitlines()
    assert len(again) == 4
    assert [json.loads(line)["loss"] for line in again[:3]] == [json.loads(line)["loss"] for line in losses]


def test_a_run_of_no_steps_is_a_checkpoint_to_start_others_from(tmp_path, run):
    seed = newest_checkpoint(pretrain(_config(tmp_path, steps=0, output=str(tmp_path / "none"))))
    assert seed.name == "step_00000000"
    started = pretrain(_config(tmp_path, steps=1, output=str(tmp_path / "a"), model=str(seed)))
    first, second = (json.loads((each / "metrics.jsonl").read_text()) for each in (started, run))
    assert first["loss"] == second["loss"] and first["grad_norm"] == second["grad_norm"]


def test_checkpoints_of_another_model_other_moments_or_another_end_of_the_data_are_refused(tmp_path, run):
    moments = TrainConfig(tokens_per_microbatch=64, moments_dtype="bfloat16")
    for said, changes in {
        r"step_00000001: is a checkpoint of a different model \(embed_tokens.weight: sh": dict(model="qwen3:tiny"),
        "another dtype, such as exp_avg.embed_tokens.weight: torch.float32, not torch.bfloat16": dict(train=moments),
        "repeat: True when the run was saved, False now": dict(loader=DataConfig(repeat=False)),
    }.items():
        with pytest.raises(UserError, match=said):
            pretrain(_config(tmp_path, steps=2, resume=True, **changes))


def test_a_run_keeps_the_vocabulary_that_it_has_learnt(tmp_path):
    data = tmp_path / "own.txt"
    data.write_text("the quick brown fox jumps over the lazy dog. " * 50)
    own = dict(data=str(data), tokenizer="bpe:290")
    pretrain(_config(tmp_path, steps=1, **own))
    with pytest.raises(UserError, match='tokenizer "bpe:280": the run was saved with "bpe:290" and keeps it'):
        pretrain(_config(tmp_path, steps=2, resume=True, **own | dict(tokenizer="bpe:280")))
    # Of fewer words a smaller vocabulary is learnt.
    data.write_text("the the the " * 100)
    with pytest.raises(UserError, match=r"tokens: \d+ when the run was saved, \d+ now; resume with the same data"):
        pretrain(_config(tmp_path, steps=2, resume=True, **own))


def _resumed_where_rank_1_sees_less(run):
    world = open_world(ParallelConfig(), "cpu")
    # As of a file system that shows rank 1 late what rank 0 has written.
    trainer = trainer_of(world, ParallelConfig(), "float32", seed=4)
    state = checkpoints_of(run / f"rank_{world.rank}", trainer).resume()
    held = whole(trainer)
    close_world(world)
    return state["step"], trainer.updates, held


def test_rank_0_says_which_checkpoint_is_resumed(tmp_path, trainer):
    with checkpoints_of(tmp_path / "rank_0", trainer) as checkpoints:
        for step in (1, 2):
            update(trainer)
            held = whole(trainer) if step == 1 else held  # noqa: F821
            checkpoints.save(step, {})
    seen = tmp_path / "rank_1" / "checkpoints"
    seen.mkdir(parents=True)
    (seen / "step_00000001").symlink_to(tmp_path / "rank_0" / "checkpoints" / "step_00000001")
    for step, updates, resumed in launch(2, _resumed_where_rank_1_sees_less, tmp_path):
        assert step == 1 and updates == 1 and equal(resumed, held)
