"""Data parallelism's own settings, and degrees that do not fit. Its training is compared in test_layouts.py."""

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch

from lockstep.config import CompileConfig, ParallelConfig, RecomputeConfig
from lockstep.model import preset
from lockstep.parallel import close_world, parallel_model
from lockstep.parallel.exchange import SumOverReplicas
from lockstep.parallel.world import AXES, World, open_world, simulated_world
from tests.parallel.launch import launch
from tests.parallel.training import assert_same_bits, train

few_steps = partial(train, steps=2, layers=2)
BLOCK_MIB = 0.376
"""A layer of qwen3:micro in bfloat16."""


def test_gathered_weights_that_are_kept_change_no_bit():
    run = partial(few_steps, dtype="bfloat16")
    freed, kept = (launch(2, run, ParallelConfig(reshard_after_forward=when))[0] for when in ("always", "never"))
    assert kept.losses == freed.losses and kept.norms == freed.norms
    assert all(torch.equal(kept.weights[name], weight) for name, weight in freed.weights.items())


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        (ParallelConfig(), "full"),
        pytest.param(ParallelConfig(data_replicate=2), "none", marks=pytest.mark.slow),
        pytest.param(ParallelConfig(pipeline=2, pipeline_schedule="zbv"), "none", marks=pytest.mark.slow),
        pytest.param(ParallelConfig(tensor=2), "selective", marks=pytest.mark.slow),
    ],
)
def test_layers_gathered_together_have_the_bits_of_layers_gathered_one_by_one(layout, recompute):
    ranks = 2 * layout.data_replicate * layout.pipeline * layout.tensor
    run = partial(train, steps=2, layers=4, dtype="bfloat16", recompute=RecomputeConfig(mode=recompute))
    alone, some, all_of_them = (
        launch(ranks, run, replace(layout, bucket_mib=mib)) for mib in (0.0, 3.1 * BLOCK_MIB / layout.tensor, 32.0)
    )
    for traces in zip(alone, some, all_of_them):
        assert_same_bits(list(traces[1:]), traces[0])


@pytest.mark.parametrize(
    "layout",
    [ParallelConfig(), pytest.param(ParallelConfig(data_replicate=2), marks=pytest.mark.slow)],
    ids=["FSDP", "HSDP"],
)
def test_gradients_summed_with_every_micro_batch_train_as_those_summed_once_a_step(layout):
    ranks = 2 * layout.data_replicate
    once, each = (
        launch(ranks, few_steps, replace(layout, reduce_gradients=when))[0] for when in ("step", "microbatch")
    )
    # The same terms in another order.
    assert each.losses == pytest.approx(once.losses, rel=1e-6) and each.norms == pytest.approx(once.norms, rel=1e-5)
    for name, way in once.moved.items():
        assert (each.moved[name] - way).norm() < 1e-2 * way.norm(), name


def _summed_over_replicas(values):
    world = open_world(ParallelConfig(data_replicate=4), "cpu")
    own = values[world.rank].clone()
    SumOverReplicas(world.replicas)(own)
    close_world(world)
    return own


def test_replicas_sum_in_a_binary_tree():
    # Large terms that cancel, so that another order of the same sum is other bits.
    values = torch.randn(4, 3, 67, generator=torch.Generator().manual_seed(0))
    values[2] -= 2.0**20 * values[1].sign()
    values[1] += 2.0**20 * values[1].sign()
    found = launch(4, _summed_over_replicas, values)
    assert all(torch.equal(each, (values[0] + values[1]) + (values[2] + values[3])) for each in found)


def test_a_whole_gradient_is_kept_where_it_fits_a_quarter_of_a_ranks_memory():
    def every(parameters, world, **degrees):
        held = dict(zip(AXES, (1, 1, 4, 1, 1))) | degrees
        return replace(world, degrees=held).sums_every_microbatch(parameters)

    small = World(torch.device("cpu"), memory=16 * 10**9)
    assert not every(10**9, small) and every(10**9 + 1, small)
    assert not every(2 * 10**9, small, tensor=2)
    assert not every(10**12, small, data_shard=1) and not every(10**12, small, pipeline=2)
    assert every(1, replace(small, reduce_gradients="microbatch"))
    assert not every(10**12, replace(small, reduce_gradients="step"))


def _devices_when_offloaded(pipeline):
    """Where this rank's stages say that they run, and where their weights lie: "meta" stands for a GPU."""
    parallel = ParallelConfig(pipeline=pipeline, cpu_offload=True)
    world = replace(simulated_world(parallel, 4), device=torch.device("meta"))
    shape = preset("qwen3:micro", 258)
    # Memory is pinned for a real GPU only.
    with patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor):
        model = parallel_model(shape, torch.float32, world, parallel, CompileConfig(), lambda model: None)
    parts = model.stages if pipeline > 1 else (model,)
    devices = [(part.device.type, next(part.parameters()).device.type) for part in parts]
    close_world(world)
    return devices


@pytest.mark.parametrize("pipeline", [1, 2])
def test_offloaded_weights_lie_in_the_cpus_memory_but_run_on_the_device(pipeline):
    assert launch(1, _devices_when_offloaded, pipeline) == [[("meta", "cpu")]]
