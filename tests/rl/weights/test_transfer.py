"""Weights go from every layout of the trainer to every layout of a generator, and damaged ones are never used."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from lockstep.config import CompileConfig, ParallelConfig
from lockstep.errors import RunStopped
from lockstep.model import build_model, initialize, preset
from lockstep.model.shard import local_part
from lockstep.parallel import close_world, generator_layout, generator_model, open_world, parallel_model
from lockstep.rl.weights import transfer as weights
from lockstep.rl.weights.in_place import materialize
from lockstep.rl.weights.transfer import WeightTransfer
from tests.parallel.launch import launch

SHAPE = preset("qwen3:micro", 131)  # which no number of ranks divides
LAYOUTS = {
    "FSDP 2": (2, ParallelConfig()),
    "DDP 2": (2, ParallelConfig(data_replicate=2)),
    "TP 2": (2, ParallelConfig(tensor=2)),
    "CP 2": (2, ParallelConfig(context=2)),
    "PP 2": (2, ParallelConfig(pipeline=2, pipeline_schedule="zbv")),
    "FSDP 3": (3, ParallelConfig()),
    "FSDP 2 x TP 2": (4, ParallelConfig(tensor=2)),
    "HSDP 2 x 2": (4, ParallelConfig(data_replicate=2)),
    "TP 4, heads copied": (4, ParallelConfig(tensor=4)),
    "TP 2 x PP 2": (4, ParallelConfig(tensor=2, pipeline=2)),
    "full DTensor": (4, ParallelConfig(context=2, tensor=2, full_dtensor=True)),
}
UP = "layers.0.mlp.up_proj.weight"


def trained_model(parallel, dtype=torch.float32, factor=1.0001):
    """A world, and the trainer's model in its layout. factor: makes rounding to the generator's dtype show."""
    world = open_world(parallel, "cpu")
    shape = replace(SHAPE, reduction_chunks=4)
    trained = parallel_model(shape, dtype, world, parallel, CompileConfig(), partial(initialize, seed=1))
    scale(trained.parameters(), factor)
    return world, trained


@torch.no_grad()
def scale(parameters, factor):
    for parameter in parameters:
        local_part(parameter)[0].mul_(factor)


def models(parallel, dtype):
    """A trainer's model with one seed, and a generator's with another."""
    world, trained = trained_model(parallel)
    shape = replace(SHAPE, reduction_chunks=4)
    return world, trained, generator_model(shape, dtype, world, parallel, partial(initialize, seed=2))


def expected_weights(dtype=torch.float32, factor=1.0001):
    """The whole trainer's weights."""
    whole = build_model(SHAPE, dtype=dtype, seed=1)
    return {name: parameter.detach() * factor for name, parameter in whole.named_parameters()}


def different(model, expected):
    """The tensors of which this rank's part differs from `expected`, rounded."""
    return [
        name
        for name, parameter in model.named_parameters()
        for part, place in [local_part(parameter.detach())]
        if not torch.equal(part, expected[name].to(part.dtype)[place])
    ]


def parts_of(model):
    return {name: local_part(parameter.detach())[0] for name, parameter in model.named_parameters()}


def every_layout(ranks):
    weights.BUCKET = 1 << 15  # several of them
    expected = expected_weights(), expected_weights(factor=1.0001 * 2)
    for name in (name for name, (size, _) in LAYOUTS.items() if size == ranks):
        dtype = torch.float32 if name == "FSDP 2" else torch.bfloat16
        world, trained, generator = models(LAYOUTS[name][1], dtype)
        transfer = WeightTransfer(dict(trained.named_parameters()), generator, world)
        for version in (1, 2):
            transfer(version)
            assert not different(generator, expected[version - 1]), (name, version)
            scale(trained.parameters(), 2)
    close_world(world)


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (3, 4))])
def test_the_generator_has_the_bits_of_the_trainers_weights_rounded_in_every_layout(ranks):
    launch(ranks, every_layout, ranks, fresh=True)  # several worlds


@contextmanager
def messages(change):
    """Passes every message between ranks to `change` after it has arrived."""
    send = dist.all_to_all_single

    def changed(output, *arguments, **keywords):
        send(output, *arguments, **keywords)
        change(output)

    dist.all_to_all_single = changed
    try:
        yield
    finally:
        dist.all_to_all_single = send


def problem_of(transfer, version):
    try:
        transfer(version)
    except RunStopped as error:
        return str(error)
    return ""


def damaged(parallel):
    """Flips the last bit that arrives of some tensors on each rank in turn; then clears all in the first two tries."""
    weights.BUCKET, weights.TRIES = 1, 1  # a message per tensor
    world, trained, generator = models(parallel, torch.bfloat16)
    transfer = WeightTransfer(dict(trained.named_parameters()), generator, world)
    before = {name: part.clone() for name, part in parts_of(generator).items()}
    for rank in range(world.size):
        for index in range(rank, len(transfer.names), 16):
            arrived = []

            def flip(output, rank=rank, index=index, arrived=arrived):
                arrived.append(output)
                if world.rank == rank and len(arrived) == index + 1:
                    output[-1] ^= 128

            with messages(flip):
                problem = problem_of(transfer, 7)
            assert f"version 7 did not arrive intact, 1 times in a row: {transfer.names[index]};" in problem
            assert all(torch.equal(part, before[name]) for name, part in parts_of(generator).items())
    weights.BUCKET, weights.TRIES = 1 << 30, 3
    arrived = []
    with messages(lambda output: len(arrived) == 2 or arrived.append(output.zero_())):
        assert not problem_of(transfer, 8)
    assert not different(generator, expected_weights())
    close_world(world)


def test_a_flipped_bit_of_any_tensor_is_named_and_the_generators_keep_their_weights():
    launch(2, damaged, ParallelConfig())


IN_PLACE = {
    # The tensors that each rank's generator reads where the trainer has them.
    "TP 2": (torch.float32, LAYOUTS["TP 2"], "all"),
    "DDP 2": (torch.float32, LAYOUTS["DDP 2"], "all"),
    "full DTensor TP 2": (torch.bfloat16, (2, ParallelConfig(tensor=2, full_dtensor=True)), "all"),
    "PP 2": (torch.float32, LAYOUTS["PP 2"], "its stage's"),
    "FSDP 2": (torch.float32, LAYOUTS["FSDP 2"], "none"),
    "bfloat16 of float32 masters": (torch.bfloat16, LAYOUTS["TP 2"], "none"),
}


def in_place(layout):
    """Changes the trainer's weights before a transfer, and then where the generator of rank 1 does not read."""
    dtype, (_, parallel), which = IN_PLACE[layout]
    weights.BUCKET = 1 << 14
    world, trained = trained_model(parallel, dtype, 1.0)
    tensors = dict(trained.named_parameters())
    generator = generator_layout(replace(SHAPE, reduction_chunks=4), dtype, world, parallel)
    fitting = materialize(generator, tensors, world.device)
    transfer = WeightTransfer(tensors, generator, world)
    transfer(1)
    first = {name: part.clone() for name, part in parts_of(generator).items()}
    scale(tensors.values(), 1.5)
    changed = {name for name, part in parts_of(generator).items() if not torch.equal(part, first[name])}
    assert fitting == changed == {"all": set(first), "its stage's": set(tensors), "none": set()}[which]
    sent = []
    with messages(lambda output: sent.append(len(output))):
        transfer(2)
    assert (sum(sent) == 0) == (which == "all" or "float32 masters" in layout)
    assert not different(generator, expected_weights(dtype, 1.5))
    if which == "all":
        if world.rank == 1:
            tensors[UP] = torch.nn.Parameter(tensors[UP].detach() * 2)
        problem = problem_of(transfer, 3)
        assert "weights version 3 did not arrive" in problem and UP in problem
    return world


def all_in_place():
    for layout in IN_PLACE:
        world = in_place(layout)
    close_world(world)


def test_a_generator_reads_the_trainers_memory_where_both_shard_alike_and_notices_if_it_moves():
    launch(2, all_in_place, fresh=True)  # several worlds


def some_frozen(parallel, dtype):
    """What is sent of each version if only two tensors are trained."""
    weights.BUCKET = 1 << 14
    names = ("norm.weight", "layers.1.mlp.up_proj.weight")
    world, trained, generator = models(parallel, dtype)
    tensors = dict(trained.named_parameters())
    transfer = WeightTransfer(tensors, generator, world, frozen=[n for n in tensors if n not in names])
    expected, sent = expected_weights(), []
    for version in range(1, 6):
        changing = [*names, *(["layers.0.self_attn.k_proj.weight"] if version == 5 else [])]
        scale([tensors[name] for name in changing if name in tensors], 1.5)
        for name in changing:
            expected[name] = expected[name] * 1.5
        if version == 3 and world.rank == 1:  # a frozen one is damaged where it is read
            parts_of(generator)["layers.0.mlp.down_proj.weight"].view(-1)[3] += 1
        lengths = []
        with messages(lambda output, lengths=lengths: lengths.append(len(output))):
            transfer(version)
        sent.append(sum(lengths))
        assert not different(generator, expected), version
    everything, trained_only = sent[:2]
    assert 0 < trained_only < everything / 4
    again = trained_only + everything  # the first try shows what differs
    assert sent == [everything, trained_only, again, trained_only, again]
    close_world(world)


@pytest.mark.parametrize(
    ("layout", "dtype"), [("FSDP 2", torch.bfloat16), pytest.param("PP 2", torch.float32, marks=pytest.mark.slow)]
)
def test_frozen_tensors_are_sent_once_and_again_when_they_differ(layout, dtype):
    ranks, parallel = LAYOUTS[layout]
    launch(ranks, some_frozen, parallel, dtype)


def dropped(parallel, dtype):
    world, trained = trained_model(parallel)
    generator = generator_layout(replace(SHAPE, reduction_chunks=4), dtype, world, parallel)
    fitting = materialize(generator, dict(trained.named_parameters()), world.device)
    transfer = WeightTransfer(dict(trained.named_parameters()), generator, world, keep=False)
    for version in (1, 2):
        transfer(version)
        parts = parts_of(generator)
        assert all(part.untyped_storage().nbytes() >= part.nbytes for part in parts.values())
        assert not different(generator, expected_weights())
        transfer.drop()
        assert {name for name, part in parts.items() if part.untyped_storage().nbytes()} == fitting
    close_world(world)


@pytest.mark.parametrize(
    ("layout", "dtype"), [("PP 2", torch.float32), pytest.param("FSDP 2", torch.bfloat16, marks=pytest.mark.slow)]
)
def test_copied_weights_have_no_memory_after_a_drop_and_the_same_bits_after_the_next_transfer(layout, dtype):
    ranks, parallel = LAYOUTS[layout]
    launch(ranks, dropped, parallel, dtype)
