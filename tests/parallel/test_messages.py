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

    gathered = world.gather({"rank": world.rank, "text": "ä" * 1000 * world.rank})
    with patch.object(messages, "CHUNK", 1000):
        arrays = world.arrays_from_main(_arrays() if world.is_main else [])
    assert all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(arrays, _arrays(), strict=True))
    with pytest.raises(UserError, match="no such ☃"):
        world.from_main(refuse)
    if world.size > 1:  # rank 0 takes longer than a message may
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2))
    chosen = world.from_main(lambda: time.sleep(2.5 * (world.size > 1)) or [world.rank, None, 0.5, "☃"])
    close_world(world)
    return gathered, chosen


def test_values_and_arrays_arrive_whole_on_every_rank_however_long_rank_0_takes():
    expected = [{"rank": rank, "text": "ä" * 1000 * rank} for rank in range(2)], [0, None, 0.5, "☃"]
    assert launch(2, _exchanged) == [expected] * 2
    assert launch(1, _exchanged) == [(expected[0][:1], expected[1])]


def _arrays():
    return [
        np.arange(2**16, dtype=np.uint16),
        np.array([], np.uint32),
        np.array([2**32 - 1], np.uint32),
        np.arange(-2, 5) << 40,
        np.array([True, False, True]),
    ]


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


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [ParallelConfig(pipeline=2), ParallelConfig(tensor=2)], ids=["pipeline", "tensor"])
def test_training_and_checkpoints_send_no_pickles(tmp_path, parallel):
    first, *others = launch(4, _trained_without_objects, tmp_path, parallel)
    assert others == [first] * 3
