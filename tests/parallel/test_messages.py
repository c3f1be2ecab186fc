"""What ranks tell each other is JSON or arrays: values of any size arrive whole, and never a pickle."""

import ast
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch.distributed as dist

import lockstep
from lockstep.config import ParallelConfig
from lockstep.errors import UserError
from lockstep.parallel import close_world, messages, open_world
from tests.checkpoint.runs import checkpoints_of, trainer_of, update
from tests.parallel.launch import launch


def _exchanged():
    world = open_world(ParallelConfig(), "cpu")

    def refuse():
        raise UserError("no such ☃")

    try:
        gathered = world.gather({"rank": world.rank, "text": "ä" * 1000 * world.rank})
        chosen = world.from_main(lambda: [world.rank, None, 0.5, "☃"])
        try:
            world.from_main(refuse)
            problem = ""
        except UserError as error:
            problem = str(error)
        return gathered, chosen, problem
    finally:
        close_world(world)


def test_values_of_different_lengths_arrive_whole_on_every_rank():
    expected = [{"rank": rank, "text": "ä" * 1000 * rank} for rank in range(3)], [0, None, 0.5, "☃"], "no such ☃"
    assert launch(3, _exchanged) == [expected] * 3
    assert launch(1, _exchanged) == [([{"rank": 0, "text": ""}], *expected[1:])]


def _arrays():
    return [
        np.arange(2**16, dtype=np.uint16),
        np.array([], np.uint32),
        np.array([2**32 - 1], np.uint32),
        np.arange(-2, 5) << 40,
        np.array([True, False, True]),
    ]


def _sent():
    world = open_world(ParallelConfig(), "cpu")
    try:
        with patch.object(messages, "CHUNK", 1000):
            return world.arrays_from_main(_arrays() if world.is_main else [])
    finally:
        close_world(world)


def test_arrays_arrive_with_their_types_in_pieces_of_any_size():
    for received in launch(2, _sent):
        for array, expected in zip(received, _arrays(), strict=True):
            assert array.dtype == expected.dtype and np.array_equal(array, expected)


def _slow():
    world = open_world(ParallelConfig(), "cpu")
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
    try:
        with patch.object(messages, "HEARTBEAT_SECONDS", 0.05):
            return world.from_main(lambda: time.sleep(1.5) or "done")
    finally:
        close_world(world)


def test_the_others_wait_for_rank_0_longer_than_a_message_may_take():
    assert launch(2, _slow) == ["done"] * 2


def _gathered():
    world = open_world(ParallelConfig(), "cpu")
    try:
        return messages.to_rank_0({"text": "☃" * 1000 * world.rank})
    finally:
        close_world(world)


def test_values_of_different_lengths_arrive_whole_on_rank_0_alone():
    assert launch(3, _gathered) == [[{"text": "☃" * 1000 * rank} for rank in range(3)], [], []]


def test_no_collective_of_the_package_unpickles():
    package = Path(lockstep.__file__).parent
    called = {
        (path.name, node.attr)
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("dist", "c10d")
    }
    assert ("messages.py", "all_gather") in called
    assert not [name for name in called if "object" in name[1]]


def _trained_without_objects(run, parallel):
    def refuse(*_):
        raise AssertionError("a pickle")

    # What all of PyTorch's collectives of objects go through.
    with patch.multiple(dist.distributed_c10d, _object_to_tensor=refuse, _tensor_to_object=refuse):
        world = open_world(parallel, "cpu")
        trainer = trainer_of(world, parallel, "float32", 3)
        with checkpoints_of(run, trainer) as checkpoints:
            loss = update(trainer)
            checkpoints.save(1, {})
        assert checkpoints.resume()["step"] == 1
        with pytest.raises(AssertionError, match="a pickle"):
            dist.all_gather_object([None] * 4, 1)
        close_world(world)
    return loss


@pytest.mark.parametrize("parallel", [ParallelConfig(pipeline=2), ParallelConfig(tensor=2)], ids=["pipeline", "tensor"])
def test_training_and_checkpoints_send_no_pickles(tmp_path, parallel):
    first, *others = launch(4, _trained_without_objects, tmp_path, parallel)
    assert others == [first] * 3
