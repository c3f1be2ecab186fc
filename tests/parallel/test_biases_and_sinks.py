"""Biases, sinks and windows in every kind of layout: one process's bits forward and, in one order, in training."""

from functools import partial
from zlib import crc32

import pytest
import torch

from lockstep.config import CompileConfig, ParallelConfig, RecomputeConfig, TrainConfig
from lockstep.model import ModelConfig, initialize, preset
from lockstep.model.shard import local_part
from lockstep.parallel import close_world, open_world, parallel_model
from lockstep.train import Trainer, pack, target_log_probs
from lockstep.train.context import shard_row
from lockstep.train.objective import NextTokenLoss
from tests.parallel.launch import launch
from tests.parallel.training import whole

DENSE = ModelConfig(
    family="qwen3",
    vocab_size=131,
    dim=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=128,
    attention_bias=True,
    sinks=True,
    windows=(20, 0),
    max_positions=512,
)
GPT_OSS = preset("gpt_oss:micro", 131)
LENGTHS = [83, 30, 41, 86]
TARGETS = sum(LENGTHS) - len(LENGTHS)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def drawn(model):
    """Fresh weights, with biases and sinks that are not zero: of a sharded one this rank's part."""
    initialize(model, seed=3)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")):
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(crc32(name.encode())))
            local, place = local_part(parameter)
            with torch.no_grad():
                local.copy_(values[place])


def train(parallel, dtype, deterministic, compiled="none", recompute="none", shape=DENSE):
    """Log-probabilities of this rank's tokens before any step, and the weights after three."""
    world = open_world(parallel, "cpu")
    model = parallel_model(
        shape, DTYPES[dtype], world, parallel, CompileConfig(compiled), drawn, RecomputeConfig(mode=recompute)
    )
    config = TrainConfig(learning_rate=3e-3, warmup_steps=0, deterministic_layout=deterministic)
    trainer = Trainer(model, config, 20, world)
    draw = torch.Generator().manual_seed(0)
    sequences = [torch.randint(131, (n,), generator=draw).tolist() for n in LENGTHS]
    rows = [pack(sequences[:2]), pack(sequences[2:])]
    own = [shard_row(row, world) for row in rows[world.data_rank :: world.data_size]]
    found = [torch.empty(0)]

    def keep(model, row):
        found.append(target_log_probs(model, row)[0])
        return found[-1].sum()

    trainer.evaluate(own, keep)
    for _ in range(3):
        trainer.step(own, NextTokenLoss(TARGETS))
    masters = {name: whole(master.detach()) for name, master in trainer.optimizer.masters.items()}
    close_world(world)
    return torch.cat(found), masters


def assert_bits_of_one_process(ranks, parallel, dtype, deterministic, **settings):
    run, alone = partial(train, **settings), ParallelConfig(reduction_chunks=parallel.tensor)
    ((log_probs, masters),) = launch(1, run, alone, dtype, deterministic, seconds=120)
    results = launch(ranks, run, parallel, dtype, deterministic, seconds=180)
    together = torch.cat([own for own, _ in results]).sort().values
    assert torch.equal(together[:: parallel.tensor], log_probs.sort().values)
    for _, own in results:
        for name, master in own.items():
            if deterministic:
                assert torch.equal(master, masters[name]), name
            else:
                # AdamW divides by a gradient's own size, and in bfloat16 a weight is rounded to 8 bits.
                assert (master - masters[name]).norm() < 2e-2 * masters[name].norm(), name
    assert set().union(*(own for _, own in results)) == set(masters)


P = ParallelConfig


def named(value):
    """Of a layout what is not as by default."""
    if not isinstance(value, ParallelConfig):
        return str(value)
    changed = {name: setting for name, setting in vars(value).items() if setting != getattr(P(), name)}
    return "-".join(f"{name}-{setting}" for name, setting in changed.items()) or "data"


@pytest.mark.parametrize(
    ("ranks", "parallel", "dtype"),
    [
        (2, P(), "float32"),
        pytest.param(2, P(tensor=2), "float32", marks=pytest.mark.slow),
        (2, P(tensor=2), "bfloat16"),
        pytest.param(2, P(context=2), "float32", marks=pytest.mark.slow),
        pytest.param(2, P(context=2), "bfloat16", marks=pytest.mark.slow),
        pytest.param(2, P(pipeline=2), "float32", marks=pytest.mark.slow),
        pytest.param(4, P(context=2, tensor=2), "float32", marks=pytest.mark.slow),
        pytest.param(4, P(context=2, tensor=2, full_dtensor=True), "float32", marks=pytest.mark.slow),
    ],
    ids=named,
)
def test_training_in_one_order_has_the_bits_of_one_process(ranks, parallel, dtype):
    assert_bits_of_one_process(ranks, parallel, dtype, True)


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (2, P(context=2)),
        (2, P(tensor=2, asynchronous_tensor=True)),
        (4, P(tensor=4)),  # more ranks than key-value heads
        pytest.param(2, P(full_dtensor=True), marks=pytest.mark.slow),
    ],
    ids=named,
)
def test_the_forward_has_the_bits_of_one_process_and_training_follows_it(ranks, parallel):
    assert_bits_of_one_process(ranks, parallel, "float32", False)


@pytest.mark.parametrize(
    ("ranks", "parallel", "dtype", "deterministic"),
    [
        (2, P(), "bfloat16", True),
        pytest.param(2, P(pipeline=2), "float32", True, marks=pytest.mark.slow),
        pytest.param(2, P(tensor=2), "float32", True, marks=pytest.mark.slow),
        (2, P(tensor=2), "bfloat16", True),
        (2, P(context=2), "float32", False),
        (2, P(expert=2), "float32", False),
        pytest.param(4, P(tensor=4), "float32", False, marks=pytest.mark.slow),
        pytest.param(2, P(tensor=2, full_dtensor=True), "float32", True, marks=pytest.mark.slow),
    ],
    ids=named,
)
def test_gpt_oss_has_the_bits_of_one_process(ranks, parallel, dtype, deterministic):
    assert_bits_of_one_process(ranks, parallel, dtype, deterministic, shape=GPT_OSS)


@pytest.mark.parametrize("parallel", [P(), P(tensor=2)], ids=named)
@pytest.mark.slow
def test_compiled_layers_have_the_bits_of_one_process(parallel):
    assert_bits_of_one_process(2, parallel, "bfloat16", True, compiled="inductor")


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_recomputed_layer_changes_no_bit(mode):
    ((log_probs, masters),) = launch(1, partial(train, P(), "float32", True))
    ((again, others),) = launch(1, partial(train, P(), "float32", True, recompute=mode))
    assert torch.equal(log_probs, again)
    assert all(torch.equal(masters[name], others[name]) for name in masters)
