"""A dry run against a real one: the same memory for what stays, the same collectives."""

import os
import subprocess
import sys
from collections import Counter

import pytest

from lockstep.config import ParallelConfig, PretrainConfig, TrainConfig
from lockstep.errors import UserError
from lockstep.model import preset
from lockstep.parallel import close_world, open_world
from lockstep.train.dry_run import dry_run
from lockstep.train.objective import NextTokenLoss
from tests.parallel.launch import launch

SHAPE = preset("llama3:tiny", 512)
WIDE = preset("llama3:tiny", 32768)
"""Most of its memory is embedding and head."""


def _config(parallel: ParallelConfig, dtype: str = "bfloat16", tokens: int = 512, **train) -> PretrainConfig:
    return PretrainConfig(
        dtype=dtype,
        sequence_length=64,
        tokens_per_step=tokens,
        parallel=parallel,
        train=TrainConfig(tokens_per_microbatch=128, **train),
    )


def _simulated(ranks: int, parallel: ParallelConfig, dtype: str = "bfloat16", tokens: int = 512, shape=SHAPE, train=()):
    found = dry_run(_config(parallel, dtype, tokens, **dict(train)), shape, ranks, NextTokenLoss(126))
    return {key: (t.calls, t.bytes) for key, t in found.traffic.items()}, found.memory, found.microbatches


def _real(parallel: ParallelConfig, dtype: str = "bfloat16", shape=SHAPE, microbatches: int = 2, train=()):
    """The collectives of real micro-batches and the update, the bytes of this rank's weights and of its optimizer,
    and the peak of all tensors."""
    from functools import partial

    import numpy as np

    from lockstep.config import CompileConfig
    from lockstep.data import Row
    from lockstep.model import initialize, resolve_dtype
    from lockstep.model.shard import local_values
    from lockstep.observe.collectives import CollectiveLog
    from lockstep.parallel import parallel_model
    from lockstep.train import Trainer
    from lockstep.train.context import shard_row
    from lockstep.train.packing import pack_rows
    from tests.parallel.memory import PeakMemory

    os.environ["LOCKSTEP_SHARED_MEMORY"] = "0"  # the collectives of other hosts' ranks, which are foreseen
    config = _config(parallel, dtype, **dict(train))
    world = open_world(parallel, "cpu")
    fill = partial(initialize, seed=0)
    with PeakMemory() as peak:
        model = parallel_model(shape, resolve_dtype(dtype), world, parallel, CompileConfig(), fill)
        trainer = Trainer(model, config.train, 1, world)
        row = Row(np.arange(64), [64], np.arange(64) > 0, padding=0)
        with CollectiveLog(world.group_names) as log:
            held = [shard_row(pack_rows([row, row]), world) for _ in range(microbatches)]
            trainer.accumulate(held, NextTokenLoss(126))
            trainer.optimizer.update(1e-3, 0.0)
    state = sum(local_values(t).nbytes for t in trainer.optimizer.state_tensors().values())
    weights = sum(local_values(p).nbytes for p in model.parameters())
    close_world(world)
    return {key: (t.calls, t.bytes) for key, t in log.traffic.items()}, weights, state, peak.nbytes


def _as_on_devices(traffic):
    """With the exchange that sums gradients on CPUs (`ExchangedSum`) counted as the reduce-scatter it stands for."""
    calls, sizes = Counter(), Counter()
    for (axis, kind), (count, size) in traffic.items():
        key = axis, kind if axis == "tensor" else kind.replace("alltoall", "reduce_scatter")
        calls[key] += count
        sizes[key] += size
    return {key: (calls[key], sizes[key]) for key in calls}


EACH = ParallelConfig(reduce_gradients="microbatch")


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(ParallelConfig(), marks=pytest.mark.slow),
        EACH,
        ParallelConfig(tensor=2),
        pytest.param(ParallelConfig(context=2), marks=pytest.mark.slow),
    ],
)
def test_it_foresees_a_real_step(parallel):
    (expected, weights, state, _), _ = launch(2, _real, parallel)
    ((traffic, memory, microbatches),) = launch(1, _simulated, 2, parallel)
    assert traffic == _as_on_devices(expected)
    assert memory["weights"] == weights
    # Of two shards a rank holds the gradients whole until the last micro-batch, unless they are summed with each.
    assert memory["gradients"] == weights * (2 if parallel in (ParallelConfig(), ParallelConfig(context=2)) else 1)
    assert memory["weights"] + memory["optimizer state"] == state
    assert memory["a micro-batch at its peak"] > 0
    assert microbatches == (4 if parallel.tensor * parallel.context > 1 else 2)


@pytest.mark.parametrize(
    "ranks, parallel, dtype, shape",
    [
        (1, ParallelConfig(), "float32", SHAPE),
        pytest.param(1, ParallelConfig(), "bfloat16", SHAPE, marks=pytest.mark.slow),
        pytest.param(1, ParallelConfig(), "float32", WIDE, marks=pytest.mark.slow),
        pytest.param(2, ParallelConfig(), "float32", SHAPE, marks=pytest.mark.slow),
        pytest.param(2, EACH, "float32", SHAPE, marks=pytest.mark.slow),
        pytest.param(2, ParallelConfig(), "bfloat16", SHAPE, marks=pytest.mark.slow),
        pytest.param(4, ParallelConfig(tensor=2), "float32", SHAPE, marks=pytest.mark.slow),
        pytest.param(4, ParallelConfig(tensor=2), "float32", WIDE, marks=pytest.mark.slow),
        pytest.param(
            4, ParallelConfig(data_replicate=2, reduce_gradients="microbatch"), "float32", SHAPE, marks=pytest.mark.slow
        ),
    ],
)
def test_its_memory_is_the_peak_of_a_real_run(ranks, parallel, dtype, shape):
    measured = [peak for *_, peak in launch(ranks, _real, parallel, dtype, shape)]
    # Two micro-batches or more on every rank, as the real run has them.
    ((_, memory, _),) = launch(1, _simulated, ranks, parallel, dtype, 1024, shape)
    assert sum(memory.values()) == pytest.approx(measured[0], rel=0.03), (memory, measured)


def _pipeline(schedule):
    return ParallelConfig(pipeline=2, pipeline_schedule=schedule)


@pytest.mark.parametrize(
    "schedule, shape",
    [
        pytest.param("1f1b", WIDE, marks=pytest.mark.slow),
        pytest.param("gpipe", SHAPE, marks=pytest.mark.slow),
        pytest.param("interleaved", SHAPE, marks=pytest.mark.slow),
        ("zbv", SHAPE),
        pytest.param("dualpipev", SHAPE, marks=pytest.mark.slow),
    ],
)
def test_of_a_pipeline_it_is_the_rank_that_needs_most(schedule, shape):
    measured = [peak for *_, peak in launch(2, _real, _pipeline(schedule), "float32", shape, 16)]
    ((_, memory, microbatches),) = launch(1, _simulated, 2, _pipeline(schedule), "float32", 2048, shape)
    assert microbatches == 16
    # 0.1 to 1.2 % measured: a real step also has its rows, and messages on their way.
    assert sum(memory.values()) == pytest.approx(max(measured), rel=0.02), (memory, measured)


@pytest.mark.parametrize("schedule, kept", [("1f1b", 0), pytest.param("zbv", 2, marks=pytest.mark.slow)])
def test_what_arrives_of_micro_batches_that_are_not_under_way_takes_no_room(schedule, kept):
    few, many = (launch(2, _real, _pipeline(schedule), "float32", SHAPE, count) for count in (8, 16))
    message = 4 * 128 * SHAPE.dim
    for (*_, less), (*_, more) in zip(few, many):
        # Their tokens, positions and the like, and what torch keeps of what is sent where a rank has several stages.
        assert more - less < 8 * message * (kept + 0.2)


@pytest.mark.parametrize(
    "train",
    [
        (("optimizer", "muon"),),
        pytest.param((("optimizer_in_backward", True), ("max_grad_norm", 0.0)), marks=pytest.mark.slow),
    ],
)
def test_what_an_update_makes_is_counted(train):
    microbatches = 1 if ("optimizer_in_backward", True) in train else 2
    ((*_, measured),) = launch(1, _real, ParallelConfig(), "float32", SHAPE, microbatches, train)
    ((_, memory, _),) = launch(1, _simulated, 1, ParallelConfig(), "float32", 128 * microbatches, SHAPE, train)
    # 0.1 % measured for Muon: a real step also has its micro-batches' rows.
    assert sum(memory.values()) == pytest.approx(measured, rel=0.01), (memory, measured)


def test_a_micro_batch_is_no_more_than_a_rank_has_rows():
    ((_, _, microbatches),) = launch(1, _simulated, 8, ParallelConfig())
    assert microbatches == 1


def _in_one_order():
    config = _config(ParallelConfig(), tokens=2048)
    config.train.optimizer, config.train.deterministic_layout = "muon", True
    found = dry_run(config, SHAPE, 4, NextTokenLoss(126))
    return {kind: t.calls for (_, kind), t in found.traffic.items()}, found.memory, found.microbatches


def test_muons_matrices_and_the_sums_of_one_order_are_counted():
    ((calls, memory, microbatches),) = launch(1, _in_one_order)
    assert microbatches == 4 and memory["sums of micro-batches"] == 2 * memory["gradients"]
    assert calls["alltoall_base"] > 0 and calls["reduce_scatter_base"] == 2 * 7  # of two micro-batches


def _muon_of_copies():
    config = _config(ParallelConfig(data_replicate=2), tokens=2048)
    config.train.optimizer = "muon"
    return {kind: t.calls for (_, kind), t in dry_run(config, SHAPE, 4, NextTokenLoss(126)).traffic.items()}


def test_muons_matrices_are_counted_over_copies_too():
    (calls,) = launch(1, _muon_of_copies)
    assert calls["alltoall_base"] > 0


@pytest.mark.slow
def test_the_command_prints_a_cluster_on_one_process():
    command = [sys.executable, "-m", "lockstep", "pretrain", "--model", "llama3:1b", "--sequence-length", "1024"]
    command += ["--tokens-per-step", "65536", "--train.tokens-per-microbatch", "1024", "--dry-run", "64"]
    printed = subprocess.run([*command, "--parallel.tensor", "4"], capture_output=True, text=True, check=True).stdout
    assert "64 ranks (data_shard 16, tensor 4)" in printed
    assert "1.236 B parameters" in printed and "together" in printed and "reduce_scatter" in printed
    with pytest.raises(UserError, match="parallel.*= 3 ranks, but 2 are running"):
        _simulated(2, ParallelConfig(tensor=3))
    with pytest.raises(UserError, match="a step has 4 micro-batches per rank.* needs 6 or more"):
        _simulated(6, ParallelConfig(pipeline=6))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", ["deepseek_v3:micro", "gpt_oss:micro"])
def test_a_mixture_whose_router_has_a_bias_is_foreseen(ranks, model):
    shape = preset(model)
    _, memory, _ = _simulated(ranks, ParallelConfig(), dtype="float32", shape=shape)
    assert memory["weights"] * ranks == pytest.approx(4 * shape.num_parameters, rel=1e-3)
