"""Weights come from every layout of the trainer to every layout of a generator, and what is damaged is never taken."""

import os
from dataclasses import replace
from functools import partial

import pytest
import torch

from lockstep.config import CompileConfig, ParallelConfig
from lockstep.errors import RunStopped, UserError
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


def _models(parallel, dtype):
    """A trainer's model with one seed, and a generator's with another."""
    world = open_world(parallel, "cpu")
    shape = replace(SHAPE, reduction_chunks=4)
    trained = parallel_model(shape, torch.float32, world, parallel, CompileConfig(), partial(initialize, seed=1))
    with torch.no_grad():
        for parameter in trained.parameters():
            local_part(parameter)[0].mul_(1.0001)  # so that rounding to the generator's dtype shows
    return world, trained, generator_model(shape, dtype, world, parallel, partial(initialize, seed=2))


def _parts(model):
    """Copies of this rank's parts, and where they stand."""
    return {name: (part.clone(), place) for name, (part, place) in _local(model).items()}


def _local(model):
    return {name: local_part(parameter.detach()) for name, parameter in model.named_parameters()}


def travel(parallel, dtype, shared=True):
    os.environ["LOCKSTEP_SHARED_MEMORY"] = str(int(shared))
    weights.BUCKET = 1 << 14  # several of them
    world, trained, generator = _models(parallel, dtype)
    transfer = WeightTransfer(dict(trained.named_parameters()), generator, world)
    assert (transfer._shared is not None) == shared
    for version in (1, 2):  # of what has arrived before, nothing is in the way
        transfer(version)
    found = _parts(generator)
    close_world(world)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_the_generator_has_the_bits_of_the_trainers_weights_rounded(layout, dtype):
    _arrives(layout, dtype, shared=True)


@pytest.mark.parametrize("layout", ["FSDP 2", "TP 2 x PP 2"])
def test_without_shared_memory_the_same_arrives_as_messages(layout):
    _arrives(layout, torch.bfloat16, shared=False)


def _arrives(layout, dtype, shared):
    ranks, parallel = LAYOUTS[layout]
    whole = build_model(SHAPE, dtype=torch.float32, seed=1)
    expected = {name: (parameter.detach() * 1.0001).to(dtype) for name, parameter in whole.named_parameters()}
    for parts in launch(ranks, travel, parallel, dtype, shared):
        assert parts.keys() == expected.keys()
        for name, (part, place) in parts.items():
            assert torch.equal(part, expected[name][place]), name


def _flip_a_bit(arrived):
    arrived["layers.1.mlp.up_proj.weight"].view(torch.uint8)[1, 5] ^= 4


def _leave_one_out(arrived):
    arrived["norm.weight"].zero_()


def _swap_two(arrived):
    one, other = "layers.0.mlp.up_proj.weight", "layers.0.mlp.gate_proj.weight"
    arrived[one], arrived[other] = arrived[other], arrived[one]


def _swap_layers(arrived):
    one, other = "layers.0.self_attn.q_proj.weight", "layers.1.self_attn.q_proj.weight"
    arrived[one], arrived[other] = arrived[other], arrived[one]


DAMAGES = {
    "a flipped bit": (_flip_a_bit, "layers.1.mlp.up_proj.weight"),
    "one left out": (_leave_one_out, "norm.weight"),
    "two swapped": (_swap_two, "layers.0.mlp.gate_proj.weight"),
    "two layers swapped": (_swap_layers, "layers.0.self_attn.q_proj.weight"),
}


def damaged(parallel, damage, times):
    """What a transfer says whose message is damaged on rank 1 so many times, and whether the weights stayed."""
    world, trained, generator = _models(parallel, torch.bfloat16)
    transfer = WeightTransfer(dict(trained.named_parameters()), generator, world)
    before, send, left = _parts(generator), transfer._send, [times]

    def torn(names, sent):
        arrived = send(names, sent)
        if world.rank == 1 and left[0]:
            left[0] -= 1
            DAMAGES[damage][0](arrived)
        return arrived

    transfer._send = torn
    said = ""
    try:
        transfer(7)
    except RunStopped as error:
        said = str(error)
    stayed = all(torch.equal(part, before[name][0]) for name, (part, _) in _local(generator).items())
    close_world(world)
    return said, stayed


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("parallel", [ParallelConfig(), ParallelConfig(tensor=2)], ids=["FSDP 2", "TP 2"])
def test_damaged_weights_are_named_and_the_generators_keep_their_own(damage, parallel):
    for said, stayed in launch(2, damaged, parallel, damage, weights.TRIES):
        assert "weights version 7 did not arrive intact, 3 times in a row" in said
        assert DAMAGES[damage][1] in said and stayed


def every_bit(parallel):
    """For each tensor whether a flipped bit on any rank is noticed, in one process group."""
    world, trained, generator = _models(parallel, torch.bfloat16)
    transfer = WeightTransfer(dict(trained.named_parameters()), generator, world)
    send, noticed = transfer._send, {}
    for rank in range(world.size):
        for name in transfer.names:

            def torn(names, sent, rank=rank, name=name):
                arrived = send(names, sent)
                if world.rank == rank and name in arrived:
                    arrived[name].view(torch.uint8).reshape(-1)[-1] ^= 128
                return arrived

            transfer._send = torn
            noticed[rank, name] = transfer._transfer()[1] == [name]
    close_world(world)
    return noticed


@pytest.mark.parametrize(
    "parallel",
    [pytest.param(ParallelConfig(), marks=pytest.mark.slow), ParallelConfig(tensor=2)],
    ids=["FSDP 2", "TP 2"],
)
def test_a_flipped_sign_in_any_tensor_on_any_rank_is_noticed(parallel):
    for noticed in launch(2, every_bit, parallel):
        assert noticed and all(noticed.values()), [key for key, seen in noticed.items() if not seen]


def test_what_arrives_whole_at_the_second_try_is_taken():
    for said, stayed in launch(2, damaged, ParallelConfig(), "a flipped bit", 1):
        assert not said and not stayed


def unlike(change):
    world, trained, generator = _models(ParallelConfig(), torch.bfloat16)
    tensors = dict(trained.named_parameters())
    name = "layers.0.mlp.up_proj.weight"
    if change == "missing":
        del tensors[name]
    else:
        tensors[name] = torch.zeros(3, 5)
    try:
        WeightTransfer(tensors, generator, world)
    except UserError as error:
        return str(error)
    finally:
        close_world(world)


@pytest.mark.parametrize(("change", "said"), [("missing", "is missing in the trainer"), ("shape", "is [3, 5] in")])
def test_tensors_that_are_not_the_generators_are_named(change, said):
    for message in launch(2, unlike, change):
        assert f"weights cannot be synced: layers.0.mlp.up_proj.weight {said}" in message


OWN = {
    # Of each rank: the tensors that its generator reads where the trainer has them.
    "TP 2": (torch.float32, "all"),
    "DDP 2": (torch.float32, "all"),
    "full DTensor TP 2": (torch.bfloat16, "all"),
    "PP 2": (torch.float32, "its stage's"),
    "FSDP 2": (torch.float32, "none"),
    "bfloat16 of float32 masters": (torch.bfloat16, "none"),
}
OWN_LAYOUTS = LAYOUTS | {
    "full DTensor TP 2": (2, ParallelConfig(tensor=2, full_dtensor=True)),
    "bfloat16 of float32 masters": LAYOUTS["TP 2"],
}


def in_place(parallel, dtype, shared=True):
    """What a generator has of the trainer's weights when those have changed, before a transfer and after one."""
    os.environ["LOCKSTEP_SHARED_MEMORY"] = str(int(shared))
    weights.BUCKET = 1 << 14
    world = open_world(parallel, "cpu")
    shape = replace(SHAPE, reduction_chunks=4)
    trained = parallel_model(shape, dtype, world, parallel, CompileConfig(), partial(initialize, seed=1))
    tensors = dict(trained.named_parameters())
    generator = generator_layout(shape, dtype, world, parallel)
    fitting = materialize(generator, tensors, world.device)
    transfer = WeightTransfer(tensors, generator, world)
    transfer(1)
    first = _parts(generator)
    with torch.no_grad():
        for tensor in tensors.values():
            local_part(tensor)[0].mul_(1.5)
    changed = {name for name, (part, _) in _local(generator).items() if not torch.equal(part, first[name][0])}
    transfer(2)
    found = _parts(generator)
    pieces = sum(len(transfer.pieces[name]) for name in transfer.names if name not in transfer.in_place_everywhere)
    close_world(world)
    return fitting, set(tensors), changed, pieces, found


@pytest.mark.parametrize("layout", OWN)
def test_a_generator_reads_the_trainers_own_weights_where_the_layout_allows_it(layout):
    dtype, which = OWN[layout]
    ranks, parallel = OWN_LAYOUTS[layout]
    whole = dict(build_model(SHAPE, dtype=dtype, seed=1).named_parameters())
    for shared in (True, False) if layout == "PP 2" else (True,):
        for fitting, of_trainer, changed, travelling, found in launch(ranks, in_place, parallel, dtype, shared):
            expected = {"all": set(whole), "its stage's": of_trainer, "none": set()}[which]
            # They change with the trainer's before anything is sent.
            assert fitting == changed == expected
            assert (travelling == 0) == (which == "all")
            for name, (part, place) in found.items():
                assert torch.equal(part, (whole[name].detach() * 1.5)[place]), name


def moved_away(parallel):
    """What a transfer says when an update was written where the generator does not read."""
    world = open_world(parallel, "cpu")
    trained = parallel_model(SHAPE, torch.float32, world, parallel, CompileConfig(), partial(initialize, seed=1))
    tensors = dict(trained.named_parameters())
    generator = generator_layout(SHAPE, torch.float32, world, parallel)
    materialize(generator, tensors, world.device)
    transfer = WeightTransfer(tensors, generator, world)
    transfer(1)
    name = "layers.0.mlp.up_proj.weight"
    if world.rank == 1:
        tensors[name] = torch.nn.Parameter(tensors[name].detach() * 2)
    try:
        transfer(2)
    except RunStopped as error:
        return str(error)
    finally:
        close_world(world)


@pytest.mark.parametrize(
    "parallel", [ParallelConfig(tensor=2), ParallelConfig(data_replicate=2)], ids=["TP 2", "DDP 2"]
)
def test_an_update_that_does_not_reach_weights_read_in_place_is_named_on_every_rank(parallel):
    for said in launch(2, moved_away, parallel):
        assert "weights version 2 did not arrive" in said and "layers.0.mlp.up_proj.weight" in said


TRAINED = ("norm.weight", "layers.1.mlp.up_proj.weight")


def some_frozen(parallel, dtype, shared):
    """The tensors that are sent for each version, and whether the generator then has the trainer's."""
    os.environ["LOCKSTEP_SHARED_MEMORY"] = str(int(shared))
    weights.BUCKET = 1 << 14
    world, trained, generator = _models(parallel, dtype)
    tensors = dict(trained.named_parameters())
    transfer = WeightTransfer(tensors, generator, world, frozen=[n for n in tensors if n not in TRAINED])
    send, sent, arrived = transfer._send, [], []

    def noted(names, of_trainer):
        sent[-1].append(names)
        return send(names, of_trainer)

    def change(names):
        with torch.no_grad():
            for name in names:
                if name in tensors:
                    local_part(tensors[name])[0].mul_(1.5)

    transfer._send = noted
    for version in range(1, 6):
        change(TRAINED)
        if version == 3 and world.rank == 1:  # a frozen one breaks where it is read
            with torch.no_grad():
                local_part(generator.get_parameter("layers.0.mlp.down_proj.weight"))[0].view(-1)[3] += 1
        if version == 5:
            change(["layers.0.self_attn.k_proj.weight"])
        sent.append([])
        transfer(version)
        arrived.append(_parts(generator))
    close_world(world)
    return [[name for names in tries for name in names] for tries in sent], arrived


@pytest.mark.parametrize("layout", ["FSDP 2", "PP 2", pytest.param("FSDP 2 x TP 2", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("dtype", "shared"), [(torch.bfloat16, True), (torch.float32, False)])
def test_frozen_tensors_are_sent_once_and_again_when_they_differ(layout, dtype, shared):
    ranks, parallel = LAYOUTS[layout]
    whole = dict(build_model(SHAPE, dtype=torch.float32, seed=1).named_parameters())
    for sent, arrived in launch(ranks, some_frozen, parallel, dtype, shared):
        every, trained = sorted(whole), sorted(TRAINED)
        both = sorted([*every, *trained])  # the first try shows what differs
        assert [sorted(names) for names in sent] == [every, trained, both, trained, both]
        for version, parts in enumerate(arrived, 1):
            for name, (part, place) in parts.items():
                changes = version if name in TRAINED else int(version == 5 and "0.self_attn.k_proj" in name)
                expected = whole[name].detach() * 1.0001
                for _ in range(changes):
                    expected = expected * 1.5
                assert torch.equal(part, expected[place].to(dtype)), (version, name)


def dropped(parallel, dtype):
    """Bytes of the copied weights and of what a transfer keeps, while they are away; and the weights after it."""
    world, trained, _ = _models(parallel, dtype)
    generator = generator_layout(replace(SHAPE, reduction_chunks=4), dtype, world, parallel)
    fitting = materialize(generator, dict(trained.named_parameters()), world.device)
    transfer = WeightTransfer(dict(trained.named_parameters()), generator, world, keep=False)
    for version in (1, 2):
        transfer(version)
        held = {name: part.untyped_storage().nbytes() for name, (part, _) in _local(generator).items()}
        assert all(size >= part.nbytes for size, (part, _) in zip(held.values(), _local(generator).values()))
        transfer.drop()
        away = {name: part.untyped_storage().nbytes() for name, (part, _) in _local(generator).items()}
        assert {name for name, size in away.items() if size} == fitting
        assert not transfer._arrived and not transfer._buffers
    transfer(3)
    found = _parts(generator)
    close_world(world)
    return found


@pytest.mark.parametrize("layout", ["FSDP 2", "PP 2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_copied_weights_have_no_memory_while_they_are_away_and_the_same_bits_after_it(layout, dtype):
    ranks, parallel = LAYOUTS[layout]
    whole = dict(build_model(SHAPE, dtype=torch.float32, seed=1).named_parameters())
    for found in launch(ranks, dropped, parallel, dtype):
        for name, (part, place) in found.items():
            assert torch.equal(part, (whole[name].detach() * 1.0001).to(dtype)[place]), name
