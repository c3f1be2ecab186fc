"""Data parallelism's own settings, and degrees that do not fit. Its training is compared in test_layouts.py."""

import pytest
import torch

from lockstep.config import ParallelConfig
from lockstep.errors import UserError
from lockstep.parallel.world import open_world, resolve_degrees
from tests.parallel.launch import launch
from tests.parallel.training import train


def test_gathered_weights_that_are_kept_change_no_bit():
    (freed, _), (kept, _) = (
        launch(2, train, ParallelConfig(reshard_after_forward=when), "bfloat16", 3) for when in ("always", "never")
    )
    assert kept.losses == freed.losses and kept.norms == freed.norms
    assert all(torch.equal(kept.weights[name], weight) for name, weight in freed.weights.items())


def test_degrees_must_multiply_to_the_number_of_ranks():
    assert resolve_degrees(ParallelConfig(tensor=2), 8)["data_shard"] == 4
    with pytest.raises(UserError, match=r"tensor 3 = 3 ranks, but 4 run; start 3 with torchrun --nproc-per-node 3"):
        resolve_degrees(ParallelConfig(tensor=3), 4)
    with pytest.raises(UserError, match=r"parallel.context is 0; it must be 1 or more"):
        resolve_degrees(ParallelConfig(context=0), 1)


def test_offloading_to_the_cpu_is_refused_on_a_cpu():
    with pytest.raises(UserError, match="cpu_offload is for CUDA devices"):
        open_world(ParallelConfig(cpu_offload=True), "cpu")
