"""FSDP, HSDP and DDP against one process: the same bits forward, the same training."""

import pytest
import torch

from lockstep.config import ParallelConfig
from lockstep.errors import UserError
from lockstep.parallel.world import resolve_degrees
from tests.parallel.launch import launch
from tests.parallel.training import train


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def alone(request):
    return request.param, launch(1, train, ParallelConfig(), request.param)[0]


@pytest.mark.parametrize(
    "ranks, layout",
    [
        (2, ParallelConfig()),
        (2, ParallelConfig(reshard_after_forward="never")),
        (2, ParallelConfig(data_replicate=2)),
        (4, ParallelConfig(data_replicate=2)),
    ],
    ids=["fsdp", "fsdp-kept", "ddp", "hsdp"],
)
def test_data_parallel_training_follows_one_process(alone, ranks, layout):
    dtype, expected = alone
    traces = launch(ranks, train, layout, dtype)
    # No sum is cut forward: the very bits.
    assert torch.equal(torch.cat([t.log_probs for t in traces]), expected.log_probs)
    # Gradients are added in another order. bfloat16 weights turn a last bit of a master into one of theirs.
    tolerance = 1e-5 if dtype == "float32" else 1e-3
    for trace in traces:
        assert trace.losses == pytest.approx(expected.losses, rel=tolerance)
        assert trace.norms[:1] == pytest.approx(expected.norms[:1], rel=tolerance)
        assert trace.weights.keys() == expected.weights.keys()


def test_degrees_must_multiply_to_the_number_of_ranks():
    assert resolve_degrees(ParallelConfig(tensor=2), 8)["data_shard"] == 4
    with pytest.raises(UserError, match=r"tensor 3 = 3 ranks, but 4 run; start 3 with torchrun --nproc-per-node 3"):
        resolve_degrees(ParallelConfig(tensor=3), 4)
    with pytest.raises(UserError, match=r"parallel.context is 0; it must be 1 or more"):
        resolve_degrees(ParallelConfig(context=0), 1)
