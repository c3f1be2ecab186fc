"""Experts on several ranks, against one process: the bits of its engine and of its steps, and what is refused."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from lockstep import Engine, EngineConfig, SamplingParams, ops
from lockstep.config import CompileConfig, ParallelConfig, PretrainConfig, RecomputeConfig, TrainConfig
from lockstep.model import ExpertsConfig, initialize, preset, resolve_dtype
from lockstep.model.shard import local_values
from lockstep.ops import Routing
from lockstep.ops.experts import feed_forward
from lockstep.parallel import close_world, generator_model, open_world, parallel_model
from lockstep.parallel.exchange import whole_rows
from lockstep.parallel.experts import experts_over_ranks
from lockstep.precision import Precision
from lockstep.train import Trainer, pack
from lockstep.train.dry_run import dry_run
from lockstep.train.objective import NextTokenLoss
from tests.parallel.launch import launch

MODEL, SHARED = "qwen3_moe:micro", "a shared expert with a gate"
SHAPES = {
    SHARED: replace(preset(MODEL, 259), experts=ExpertsConfig(8, 48, Routing(2), 64, shared_gate=True)),
}  # fmt: skip


def sampled(ranks, dtype, model=MODEL):
    """What an engine on so many tensor ranks samples: a step of one token, of many, and of prompts in chunks."""
    parallel = ParallelConfig(tensor=ranks, reduction_chunks=2, data_shard=1)
    world = open_world(parallel, "cpu")
    shape = SHAPES[model] if model in SHAPES else preset(model, 259)
    decoder = generator_model(shape, resolve_dtype(dtype), world, parallel, partial(initialize, seed=3))
    engine = Engine(decoder, EngineConfig(max_tokens_per_step=37, cache_tokens=512))
    groups = engine.generate([[1]], SamplingParams(max_tokens=5, seed=1))
    groups += engine.generate([[1], list(range(40)), [5, 6, 7]], SamplingParams(max_tokens=9, seed=1, n=2))
    close_world(world)
    return [(c.token_ids, c.logprobs) for group in groups for c in group]


BFLOAT16 = (MODEL, "gpt_oss:micro", "deepseek_v3:micro")


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        (MODEL, "float32"),
        (SHARED, "float32"),
        *(pytest.param(model, "bfloat16", marks=pytest.mark.slow) for model in BFLOAT16),
    ],
)
def test_an_engine_whose_ranks_share_the_experts_samples_what_one_process_samples(model, dtype):
    (alone,) = launch(1, sampled, 1, dtype, model)
    assert launch(2, sampled, 2, dtype, model) == [alone] * 2


def through(weights, formats, rows, starts):
    return feed_forward(rows, starts, *weights, formats)


def same_bits(ours, theirs):
    """Also of zeros, which have a sign."""
    return torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


def compare_random(rounds, linear):
    """In a number format: rows that cancel and uneven choices, of as many tokens on each rank as it likes, in every
    number of experts."""
    world = open_world(ParallelConfig(tensor=2), "cpu")
    group, draw = world.mesh.get_group("tensor"), torch.Generator().manual_seed(0)
    problems, formats = [], (linear,) * 3
    for number in range(rounds):
        count, active = [(2, 1), (4, 2), (6, 3), (8, 8)][number % 4]
        kind = torch.float32 if number % 8 < 4 else torch.bfloat16
        weights_of = [torch.randn(count, *s, generator=draw).to(kind) for s in ((64, 32), (64, 32), (32, 64))]
        tokens = [int(n) for n in torch.randint(0, 40, (2,), generator=draw)]
        x = torch.randn(sum(tokens), 32, generator=draw) * (torch.rand(sum(tokens), 1, generator=draw) * 12).exp2()
        x[:, 16:] = -x[:, :16] * (1 + 2.0**-8)
        x[:, 3] = -0.0
        x, scores = x.to(kind), torch.rand(sum(tokens), count, generator=draw)
        scores[:, number % count] += number % 3  # now and then one expert takes all
        weights, chosen = scores.topk(active)
        grad = torch.randn(sum(tokens), 32, generator=draw).to(kind)

        def run(function, rows, x=x, weights=weights, chosen=chosen, grad=grad):
            leaves = [x[rows].clone().requires_grad_(), weights[rows].clone().requires_grad_()]
            out = function(*leaves, chosen[rows])
            out.backward(grad[rows])
            return [out.detach(), *(leaf.grad for leaf in leaves)]

        own = [w.chunk(2)[world.rank].clone().requires_grad_() for w in weights_of]
        whole = [w.clone().requires_grad_() for w in weights_of]

        beside = [torch.randn(32, 32, generator=draw).to(kind) for _ in range(2)]

        def all_go_through(x, beside=beside):
            return ops.silu_mul(ops.linear(x, beside[0]), ops.linear(x, beside[1]))

        also = all_go_through if number % 3 else None

        def shared(x, weights, chosen, own=own, count=count, also=also):
            return experts_over_ranks(x, weights, chosen, count, group, partial(through, own, formats), also)

        rows = slice(0, tokens[0]) if world.rank == 0 else slice(tokens[0], None)
        found = run(shared, rows)
        expected = run(lambda x, w, c, whole=whole, also=also: ops.experts(x, w, c, *whole, also, formats), slice(None))
        problems += [number for ours, theirs in zip(found, expected) if not same_bits(ours, theirs[rows])]
        if kind == torch.float32:  # the sums over tokens are made in the order of one process
            parts = zip(own, whole)
            problems += [number for o, w in parts if not same_bits(o.grad, w.grad.chunk(2)[world.rank])]
        with torch.no_grad(), whole_rows():
            everywhere = shared(x, weights, chosen)
        problems += [number] if not same_bits(everywhere, expected[0]) else []
    close_world(world)
    return problems


@pytest.mark.parametrize("linear", ["none", "int8", "mxfp8"])
def test_rows_that_travelled_have_the_bits_of_rows_that_stayed(linear):
    assert launch(2, compare_random, 24, linear) == [[], []]


def stepped(parallel, mode, count=8, linear="none"):
    """Losses, gradients' norms and what was counted, of steps in which layers recompute or not."""
    world = open_world(parallel, "cpu")
    shape = replace(preset(MODEL, 131), num_layers=2)
    shape = replace(shape, experts=replace(shape.experts, count=count), precision=Precision(linear, ("lm_head",)))
    fill = partial(initialize, seed=3)
    model = parallel_model(shape, torch.bfloat16, world, parallel, CompileConfig(), fill, RecomputeConfig(mode))
    trainer = Trainer(model, TrainConfig(warmup_steps=0), 2, world)
    draw = torch.Generator().manual_seed(0)
    rows = [pack([torch.randint(131, (n,), generator=draw).tolist()]) for n in (31, 17, 24, 9)]
    found = [trainer.step(rows[world.data_rank :: world.data_size], NextTokenLoss(77)) for _ in range(2)]
    owned = {tuple(local_values(p).shape) for n, p in model.named_parameters() if ".experts." in n}
    close_world(world)
    return [[step[name] for name in ("loss", "grad_norm")] for step in found], found[-1], owned


@pytest.mark.slow
def test_recomputing_layers_travel_again_and_keep_the_bits():
    kept, again = (launch(4, stepped, ParallelConfig(expert=2, tensor=2), mode) for mode in ("none", "full"))
    assert kept[0][0] == again[0][0]
    _, counted, owned = kept[0]
    assert owned == {(2, 128, 128)}  # of 8 experts on 4 ranks
    assert counted == kept[3][1]
    assert 1.0 < counted["experts/imbalance"] < 4.0
    # Two layers of rows of two experts a token, 128 wide in bfloat16, there and back, forward and backward: as many as
    # a rank with 48 of 88 padded tokens, shared by two ranks, has in a step, if three in four are away.
    most = 2 * 48 / 2 * 2 * 128 * 2 * 4 / 2**20
    assert 0.5 * most < counted["experts/sent_mib"] < most
    assert again[0][1]["experts/sent_mib"] == pytest.approx(1.5 * counted["experts/sent_mib"], rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [ParallelConfig(), ParallelConfig(expert=2), ParallelConfig(tensor=2)])
def test_fewer_experts_than_ranks_are_cut_within(parallel):
    (alone,) = launch(1, stepped, ParallelConfig(reduction_chunks=2), "none", 2)
    for losses, _, owned in launch(4, stepped, replace(parallel, reduction_chunks=2), "none", 2):
        for found, expected in zip(losses, alone[0]):
            assert found == pytest.approx(expected, rel=1e-3 if parallel.tensor == 1 else 5e-3)
        assert sum(expert * outputs * inputs for expert, outputs, inputs in owned) == 2 * 128 * 128 / 4


@pytest.mark.parametrize("linear", ["int8", pytest.param("mxfp8", marks=pytest.mark.slow)])
def test_experts_on_several_ranks_learn_in_a_number_format(linear):
    (alone,) = launch(1, stepped, ParallelConfig(), "none", 8, linear)
    for losses, _, owned in launch(2, stepped, ParallelConfig(expert=2), "none", 8, linear):
        # Of micro-batches whose sums are added in another order, in bfloat16.
        assert losses[0] == pytest.approx(alone[0][0], rel=1e-3) and losses[1] == pytest.approx(alone[0][1], rel=1e-3)
        assert owned == {(4, 128, 128)}


def simulated(parallel, ranks):
    config = PretrainConfig(
        dtype="bfloat16", sequence_length=64, tokens_per_step=64 * 8, parallel=parallel,
        train=TrainConfig(tokens_per_microbatch=64),
    )  # fmt: skip
    return dry_run(config, preset(MODEL, 258), ranks, NextTokenLoss(64))


@pytest.mark.slow
def test_a_dry_run_counts_the_experts_messages_and_their_share():
    alone, shared = simulated(ParallelConfig(), 4), simulated(ParallelConfig(expert=4), 4)
    messages = {key: held for key, held in shared.traffic.items() if key[1] == "alltoall_base"}
    (travelled,) = messages.values()
    # In a micro-batch and each of 4 layers: counts and rows there, rows back, and both backward.
    assert travelled.calls == 4 * 5 * shared.passed
    rows = 4 * 64 * 2 * shared.passed
    assert travelled.bytes == pytest.approx(4 * rows * 128 * 2, rel=0.01)
    assert not [key for key in alone.traffic if key[1] == "alltoall_base"]
    assert shared.memory["weights"] == pytest.approx(alone.memory["weights"], rel=0.01)
    assert "expert 4" in shared.text()
