"""A checkpoint is whole or it is not one: damage is named, an older one is used, a full disk stops nothing."""

import json
import os
import re

import pytest
import torch

from lockstep.checkpoint import checkpoints_in, newest_checkpoint
from lockstep.checkpoint.checkpoints import Checkpoints
from lockstep.checkpoint.convert import convert
from lockstep.checkpoint.manifest import damage, write_manifest
from lockstep.config import CheckpointConfig, DataConfig, ParallelConfig, PretrainConfig, TrainConfig
from lockstep.errors import UserError
from lockstep.parallel import World, close_world, open_world
from lockstep.train.pretrain import pretrain
from tests.checkpoint.runs import checkpoints_of, equal, full_disk, trainer_of, update, whole
from tests.parallel.launch import launch

WORLD = World(torch.device("cpu"))


@pytest.fixture
def trainer():
    return trainer_of(WORLD, ParallelConfig(), "float32", seed=3)


def _flip(path, position):
    with path.open("r+b") as file:
        file.seek(position, os.SEEK_SET if position >= 0 else os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize(
    "harm, named",
    [
        (lambda f: os.truncate(f / "model.safetensors", 5000), r"model.safetensors has 5000 bytes instead of \d+"),
        (lambda f: _flip(f / "model.safetensors", -1), "model.safetensors: tensor .* does not match its checksum"),
        (
            lambda f: _flip(f / "trainer/optimizer.safetensors", -9),
            "trainer/optimizer.safetensors: tensor step.* checksum",
        ),
        (lambda f: _flip(f / "model.safetensors", 40), "model.safetensors does not match its checksum"),
        (lambda f: _flip(f / "state.json", 3), "state.json does not match its checksum"),
        (lambda f: (f / "trainer/random.safetensors").unlink(), "trainer/random.safetensors is missing"),
        (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda f: os.truncate(f / "manifest.json", 99), "manifest.json cannot be read .*"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_newest_whole_one_is_used(tmp_path, trainer, harm, named, caplog):
    with checkpoints_of(tmp_path, trainer) as checkpoints:
        for step in (1, 2):
            update(trainer)
            held = whole(trainer) if step == 1 else held  # noqa: F821
            checkpoints.save(step, {"mark": step})
    harm(checkpoints_in(tmp_path / "checkpoints")[0])
    state = checkpoints.resume()
    assert re.search(f"step_00000002 cannot be resumed from: {named}; trying an older one", caplog.text)
    assert state["mark"] == 1 and trainer.updates == 1 and equal(whole(trainer), held)
    harm(checkpoints_in(tmp_path / "checkpoints")[1])
    with pytest.raises(UserError, match=f"cannot resume from any checkpoint in it, the oldest because {named}"):
        checkpoints.resume()


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


def test_the_last_save_waits_and_takes_no_copy_of_what_it_saves(tmp_path, trainer):
    update(trainer)
    held = whole(trainer)
    checkpoints = checkpoints_of(tmp_path, trainer)
    checkpoints.save(1, {})
    checkpoints.wait()
    written = []
    checkpoints._write = lambda step, parts, *rest: (
        written.append(parts) or Checkpoints._write(checkpoints, step, parts, *rest)
    )
    checkpoints.save(2, {}, last=True)
    assert [int(p.name[-1]) for p in checkpoints_in(tmp_path / "checkpoints")] == [2, 1], "it is on disk"
    own = {tensor.data_ptr() for tensor in trainer.optimizer.state_tensors().values()}
    assert {part.local.data_ptr() for name, part in written[0].items() if "random/" not in name} == own
    assert not checkpoints._staging._buffers, "the copies of the save before are released"
    update(trainer)
    checkpoints.resume()
    assert equal(whole(trainer), held)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_disk_leaves_the_run_going_and_the_earlier_checkpoint_whole(tmp_path, ranks):
    for said in launch(ranks, full_disk, tmp_path):
        assert said[0] == said[2] == "" and "step_00000002" in said[1] and "File too large" in said[1]
        assert "step_00000004" in said[3]
    assert [p.name for p in checkpoints_in(tmp_path / "checkpoints")] == ["step_00000003", "step_00000001"]
    (tmp_path / "checkpoints" / "step_00000004.partial").unlink()
    assert not list((tmp_path / "checkpoints").glob("*.partial"))
    assert not any(damage(p) for p in checkpoints_in(tmp_path / "checkpoints"))


def test_resuming_takes_no_second_copy_of_masters_and_moments(tmp_path, trainer):
    update(trainer)
    with checkpoints_of(tmp_path, trainer) as checkpoints:
        checkpoints.save(1, {})
    _, (parts, state, _) = checkpoints._to_load(tmp_path / "checkpoints" / "step_00000001")
    held = trainer.optimizer.state_tensors()
    assert state.keys() == held.keys() and any(name.startswith("exp_avg_sq.") for name in held)
    assert all(state[name].data_ptr() == held[name].data_ptr() for name in held)
    assert {p.local.data_ptr() for n, p in parts.items() if "random/" not in n} == {t.data_ptr() for t in held.values()}


def _config(tmp_path, **changes):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    defaults = dict(
        output=str(tmp_path / "run"), model="qwen3:micro", data=str(tmp_path / "text.txt"), tokens_per_step=128,
        sequence_length=32, steps=3, train=TrainConfig(tokens_per_microbatch=64), dtype="float32",
    )  # fmt: skip
    return PretrainConfig(**(defaults | changes))


def _limited(config, limit):
    import logging
    import resource
    from logging.handlers import MemoryHandler

    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    heard = MemoryHandler(capacity=1000, flushLevel=logging.CRITICAL)
    logging.getLogger("lockstep").addHandler(heard)
    try:
        pretrain(config)
    except UserError as error:
        said = [record.getMessage() for record in heard.buffer]
        return str(error), [message for message in said if "CHECKPOINT" in message]


def test_a_run_whose_last_checkpoint_failed_says_so_at_its_end(tmp_path):
    config = _config(tmp_path, checkpoint=CheckpointConfig(every=1))
    message, warned = launch(1, _limited, config, 10**6)[0]
    assert "last checkpoint could not be written: step_00000003" in message and "--resume" in message
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


def test_a_damaged_checkpoint_is_not_converted(tmp_path):
    newest = newest_checkpoint(pretrain(_config(tmp_path, steps=1)))
    weights = bytearray((newest / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (newest / "model.safetensors").write_bytes(weights)
    with pytest.raises(UserError, match=r"is damaged: .*model.safetensors.*; use an older checkpoint"):
        convert(newest, tmp_path / "converted")
    assert not (tmp_path / "converted").exists()


def test_a_run_of_no_steps_is_a_checkpoint_to_start_others_from(tmp_path):
    seed = newest_checkpoint(pretrain(_config(tmp_path, steps=0, seed=5)))
    assert seed.name == "step_00000000"
    started = pretrain(_config(tmp_path, steps=1, seed=5, output=str(tmp_path / "a"), model=str(seed)))
    fresh = pretrain(_config(tmp_path, steps=1, seed=5, output=str(tmp_path / "b")))
    first, second = (json.loads((run / "metrics.jsonl").read_text()) for run in (started, fresh))
    assert first["loss"] == second["loss"] and first["grad_norm"] == second["grad_norm"]


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    run = pretrain(_config(tmp_path, steps=1))
    with pytest.raises(
        UserError, match=r"step_00000001: is a checkpoint of a different model \(embed_tokens.weight: sh"
    ):
        pretrain(_config(tmp_path, steps=2, resume=True, model="qwen3:tiny"))
    assert run.is_dir()


@pytest.mark.parametrize(("saved", "wanted"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_moments_of_another_dtype_are_refused_by_name(tmp_path, saved, wanted):
    pretrain(_config(tmp_path, steps=1, train=TrainConfig(tokens_per_microbatch=64, moments_dtype=saved)))
    said = rf"another dtype, such as exp_avg.embed_tokens.weight: torch.{saved}, not torch.{wanted}; give the train.mom"
    with pytest.raises(UserError, match=said):
        train = TrainConfig(tokens_per_microbatch=64, moments_dtype=wanted)
        pretrain(_config(tmp_path, steps=2, resume=True, train=train))


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


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path, model_folder):
    config = _config(tmp_path, model=str(model_folder), data=__file__, tokenizer="bpe:600")
    with pytest.raises(UserError, match=r"the tokenizer has 600 tokens, but .*model\d* only 512; leave --tok"):
        pretrain(config)


def test_the_newest_whole_checkpoint_is_found(tmp_path):
    assert newest_checkpoint(tmp_path) is None
    for name in ("step_00000002", "step_00000010", "step_00000012.partial"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        write_manifest(tmp_path / "checkpoints" / name, [])
    (tmp_path / "checkpoints" / "step_00000011").mkdir()
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step_00000010"


def test_a_model_alone_is_not_resumed_from_when_the_data_are_to_be_repeated(tmp_path):
    once = dict(loader=DataConfig(repeat=False), steps=1000, checkpoint=CheckpointConfig(last_model_only=True))
    run = pretrain(_config(tmp_path, **once))
    lines = (run / "metrics.jsonl").read_text()
    assert 1 < len(lines.splitlines()) < 1000
    pretrain(_config(tmp_path, resume=True, **once))
    assert (run / "metrics.jsonl").read_text() == lines, "the data has ended, so nothing is left to train"
    again = once | dict(loader=DataConfig(repeat=True))
    with pytest.raises(UserError, match="cannot resume from any checkpoint .* contains only the model"):
        pretrain(_config(tmp_path, resume=True, **again))
    assert (run / "metrics.jsonl").read_text() == lines


def test_a_position_in_data_that_were_to_end_is_refused_where_they_are_to_be_repeated(tmp_path):
    pretrain(_config(tmp_path, loader=DataConfig(repeat=False), steps=1))
    with pytest.raises(UserError, match="repeat: False when the run was saved, True now"):
        pretrain(_config(tmp_path, loader=DataConfig(repeat=True), steps=2, resume=True))


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
