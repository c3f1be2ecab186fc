"""With `train.deterministic_layout` a run has the same bits on any number of data-parallel ranks."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from lockstep import ops
from lockstep.cli import main
from lockstep.config import CompileConfig, ParallelConfig, PretrainConfig, TrainConfig
from lockstep.data import divide_step
from lockstep.errors import UserError
from lockstep.model import initialize, preset
from lockstep.model.shard import local_values
from lockstep.ops import head_gradients
from lockstep.parallel import close_world, open_world, parallel_model
from lockstep.parallel.world import AXES, World
from lockstep.train import Trainer, pack
from lockstep.train.context import shard_row
from lockstep.train.gradient_norm import exact_norms
from lockstep.train.objective import NextTokenLoss
from lockstep.train.pretrain import pretrain
from lockstep.train.refusals import layout_problems
from tests.parallel.launch import launch
from tests.parallel.training import whole

STEPS = 20
COPIES = [
    (2, ParallelConfig()),
    (2, ParallelConfig(data_replicate=2)),
    (4, ParallelConfig()),
    (4, ParallelConfig(data_replicate=2)),
    (4, ParallelConfig(data_replicate=4)),
]
SHARED = {
    "TP 2": (2, ParallelConfig(tensor=2)),
    "CP 2": (2, ParallelConfig(context=2)),
    "PP 2, 1F1B": (2, ParallelConfig(pipeline=2)),
    "PP 2, interleaved": (2, ParallelConfig(pipeline=2, pipeline_schedule="interleaved")),
    "PP 2, ZBV": (2, ParallelConfig(pipeline=2, pipeline_schedule="zbv")),
    "FSDP 2 x PP 2, 1F1B": (4, ParallelConfig(pipeline=2)),
    "FSDP 2 x PP 2, ZBV": (4, ParallelConfig(pipeline=2, pipeline_schedule="zbv")),
    "FSDP 2 x TP 2": (4, ParallelConfig(tensor=2)),
    "FSDP 2 x CP 2": (4, ParallelConfig(context=2)),
    "CP 2 x TP 2": (4, ParallelConfig(context=2, tensor=2)),
    "TP 2 x PP 2": (4, ParallelConfig(tensor=2, pipeline=2)),
    "full DTensor": (4, ParallelConfig(context=2, tensor=2, full_dtensor=True)),
}
ODD = {
    "FSDP 3": (3, ParallelConfig()),
    "DDP 3": (3, ParallelConfig(data_replicate=3)),
    "FSDP 6": (6, ParallelConfig()),
    "HSDP 2 x 3": (6, ParallelConfig(data_replicate=3)),
    "FSDP 3 x TP 2": (6, ParallelConfig(tensor=2)),
    "FSDP 3 x CP 2": (6, ParallelConfig(context=2)),
    "FSDP 3 x PP 2": (6, ParallelConfig(pipeline=2)),
    "FSDP 3 x PP 2, ZBV": (6, ParallelConfig(pipeline=2, pipeline_schedule="zbv")),
}
WIDE = {
    "TP 4": (4, ParallelConfig(tensor=4)),
    "CP 2 x TP 4": (8, ParallelConfig(context=2, tensor=4)),
    "TP 4 x PP 2, ZBV": (8, ParallelConfig(tensor=4, pipeline=2, pipeline_schedule="zbv")),
    "full DTensor": (8, ParallelConfig(context=2, tensor=4, full_dtensor=True)),
}


def train(
    parallel,
    dtype,
    microbatches,
    steps=STEPS,
    deterministic=True,
    optimizer="adamw",
    compiled="none",
    rules=(),
    model="qwen3:micro",
    heads=(),
):
    """Losses and gradient norms of each step, and the weights after the last; odd lengths, so that sums are uneven."""
    world = open_world(parallel, "cpu")
    shape = replace(preset(model, 131), **dict(heads))
    kind = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    fill = partial(initialize, seed=3)
    decoder = parallel_model(shape, kind, world, parallel, CompileConfig(compiled), fill)
    config = TrainConfig(
        learning_rate=3e-3,
        warmup_steps=0,
        deterministic_layout=deterministic,
        optimizer=optimizer,
        max_grad_norm=0.3,
        rules=rules,
    )
    trainer = Trainer(decoder, config, STEPS, world)
    draw = torch.Generator().manual_seed(0)
    # Two sequences a micro-batch, of which context ranks have uneven parts, and targets in several slices of the head.
    head_gradients.SLICE_BYTES = 7 * 131 * 4
    lengths = [(n, 3 + n % 5) for n in range(19, 19 + microbatches)]
    rows = [pack([torch.randint(131, (n,), generator=draw).tolist() for n in pair]) for pair in lengths]
    targets = sum(len(row.targets) for row in rows)
    own = [shard_row(row, world) for row in rows[world.data_rank :: world.data_size]]
    found = []
    for _ in range(steps):
        metrics = trainer.step(own, NextTokenLoss(targets))
        found.append([metrics[name] for name in ("loss", "grad_norm", "grad_norm/attention", "grad_norm/norms")])
    found.append(trainer.evaluate(own, NextTokenLoss(targets)))
    masters = {name: whole(master.detach()) for name, master in trainer.optimizer.masters.items()}
    close_world(world)
    return found, masters


def check(layouts, chunks, dtype, microbatches, steps, *settings):
    """Every layout takes the steps of one process, with as many chunks, to the last bit."""
    settings, seconds = (dtype, microbatches, steps, *settings), 30 * max(4, steps)
    (alone,) = launch(1, train, ParallelConfig(reduction_chunks=chunks), *settings, seconds=seconds)
    assert alone[0][0][0] > 1.1 * alone[0][-2][0]  # it learns, so each step's bits depend on all before it
    assert alone[0][0][1] > 0.3  # and gradients are clipped
    for ranks, parallel in layouts:
        results = launch(ranks, train, replace(parallel, reduction_chunks=chunks), *settings, seconds=seconds)
        assert set().union(*(masters for _, masters in results)) == set(alone[1])
        for found, masters in results:
            assert found == alone[0], (ranks, parallel)
            for name, master in masters.items():
                assert torch.equal(master, alone[1][name]), (name, parallel)


@pytest.mark.parametrize(
    ("dtype", "microbatches", "steps", "optimizer", "layouts"),
    [
        pytest.param("float32", 8, 5, "adamw", COPIES[1:], marks=pytest.mark.slow),
        ("bfloat16", 12, 5, "muon", COPIES[3:]),
        pytest.param("float32", 8, STEPS, "adamw", COPIES, marks=pytest.mark.slow),
        pytest.param("bfloat16", 12, STEPS, "muon", COPIES, marks=pytest.mark.slow),
    ],
)
def test_steps_have_the_same_bits_on_every_number_of_data_parallel_ranks(
    dtype, microbatches, steps, optimizer, layouts
):
    check(layouts, 1, dtype, microbatches, steps, True, optimizer)


@pytest.mark.parametrize(
    ("dtype", "steps", "optimizer", "layouts"),
    [
        ("bfloat16", 3, "adamw", ["FSDP 2 x PP 2, 1F1B"]),
        ("float32", 3, "adamw", ["FSDP 2 x PP 2, ZBV", "FSDP 2 x TP 2"]),
        pytest.param("bfloat16", 3, "muon", ["FSDP 2 x PP 2, ZBV", "CP 2 x TP 2"], marks=pytest.mark.slow),
        pytest.param("float32", STEPS, "adamw", SHARED, marks=pytest.mark.slow),
        pytest.param("bfloat16", STEPS, "muon", SHARED, marks=pytest.mark.slow),
    ],
)
def test_steps_have_the_same_bits_where_ranks_share_tokens_features_and_layers(dtype, steps, optimizer, layouts):
    check([SHARED[name] for name in layouts], 2, dtype, 8, steps, True, optimizer)


@pytest.mark.parametrize(
    ("dtype", "microbatches", "optimizer", "layouts"),
    [
        ("float32", 9, "adamw", ["FSDP 3"]),
        pytest.param("bfloat16", 9, "muon", ["FSDP 3", "DDP 3"], marks=pytest.mark.slow),
        pytest.param("float32", 12, "adamw", ODD, marks=pytest.mark.slow),
        pytest.param("bfloat16", 18, "adamw", ["FSDP 6", "HSDP 2 x 3"], marks=pytest.mark.slow),
    ],
)
def test_steps_have_the_same_bits_where_a_round_of_micro_batches_is_no_subtree(dtype, microbatches, optimizer, layouts):
    check([ODD[name] for name in layouts], 2, dtype, microbatches, 3, True, optimizer)


@pytest.mark.parametrize(
    ("dtype", "steps", "heads", "layouts"),
    [
        # Two heads of queries on each rank, and two ranks for each head of keys, which have a norm in this family.
        ("float32", 3, dict(num_heads=8, num_kv_heads=2), ["TP 4"]),
        pytest.param("float32", 3, dict(num_heads=8, num_kv_heads=4), ["TP 4"], marks=pytest.mark.slow),
        pytest.param("bfloat16", 5, dict(num_heads=4, num_kv_heads=1), WIDE, marks=pytest.mark.slow),
        pytest.param(
            "float32", 5, dict(num_heads=4, num_kv_heads=2, attention_bias=True), WIDE, marks=pytest.mark.slow
        ),
    ],
)
def test_steps_have_the_same_bits_on_as_many_tensor_ranks_as_key_value_heads_and_on_more(dtype, steps, heads, layouts):
    heads = tuple(heads.items())
    check([WIDE[name] for name in layouts], 4, dtype, 4, steps, True, "adamw", "none", (), "qwen3:micro", heads)


def test_a_frozen_embedding_that_two_stages_share_is_trained_around():
    frozen = ("embed_tokens* frozen=true",)
    check([SHARED["PP 2, 1F1B"]], 1, "float32", 4, 3, True, "adamw", "none", frozen)


@pytest.mark.slow
def test_compiled_steps_have_the_same_bits_in_every_layout():
    layouts = [SHARED[name] for name in ("TP 2", "CP 2", "PP 2, 1F1B", "CP 2 x TP 2", "full DTensor")]
    check(layouts, 2, "float32", 4, 4, True, "adamw", "inductor")


def test_without_it_the_bits_depend_on_the_layout():
    (alone,) = launch(1, train, ParallelConfig(), "float32", 8, 4, False)
    assert launch(4, train, ParallelConfig(), "float32", 8, 4, False)[0][0] != alone[0]


def test_squares_are_added_exactly_in_any_order_and_any_parts():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(70_001, generator=draw) * torch.exp(8 * torch.randn(70_001, generator=draw))
    for values in (x, x * 1e-20, torch.zeros(5)):
        largest = float(values.abs().max())
        exponent = 40 - 2 * int(np.frexp(largest)[1])
        total = ops.integer_squares(values, exponent)
        parts = values[torch.randperm(len(values), generator=draw)].split(1237)
        assert int(total) == sum(int(ops.integer_squares(part, exponent)) for part in parts)
        assert int(total) == sum(int(ops.integer_squares(part[None].T.T[:, ::1], exponent)) for part in parts)
        squares = values.double().square().numpy() * 2.0**exponent
        assert int(total) == sum(int(s) for s in np.rint(squares))


@pytest.mark.parametrize(
    ("degrees", "others", "message"),
    [
        (
            {"data_shard": 3, "data_replicate": 2},
            {},
            "with parallel.data_replicate 2, the number of shards must be a power of two and is 3; set "
            "parallel.data_replicate to 1 or 6",
        ),
        ({"data_shard": 4}, {"device": torch.device("cuda")}, "up to 2 GPUs so far, not 4"),
        (
            {"tensor": 2},
            {"device": torch.device("cuda")},
            "with parallel.tensor 2 only works on CPUs so far, not on cuda",
        ),
        (
            {"data_shard": 4},
            {"full_dtensor": True},
            "does not work with parallel.full_dtensor over data-parallel ranks",
        ),
    ],
)
def test_layouts_with_other_orders_are_refused_by_name(degrees, others, message):
    world = World(others.get("device", torch.device("cpu")), dict.fromkeys(AXES, 1) | degrees)
    parallel = ParallelConfig(full_dtensor=others.get("full_dtensor", False))
    (problem,) = layout_problems(preset("qwen3:micro", 131), world, parallel, CompileConfig())
    assert message in problem


@pytest.mark.parametrize("name", ["gpt_oss:micro", "deepseek_v3:micro"])
def test_more_tensor_ranks_than_key_value_heads_are_refused_where_their_gradients_are_not_in_one_order(name):
    shape = preset(name, 131)
    degrees = dict.fromkeys(AXES, 1) | {"tensor": 2 * shape.num_kv_heads}
    (problem,) = layout_problems(shape, World(torch.device("cpu"), degrees), ParallelConfig(), CompileConfig())
    assert f"fewer key-value heads ({shape.num_kv_heads}) does not work with this model family" in problem
    world = World(torch.device("cpu"), degrees | {"tensor": 4})
    (problem,) = layout_problems(preset("qwen3:micro", 131), world, ParallelConfig(), CompileConfig("inductor"))
    assert "fewer key-value heads (2) does not work with compile.backend" in problem


@pytest.mark.parametrize(("head_dim", "chunks"), [(6, 4), (20, 4), (4, 8)])
def test_keys_that_do_not_divide_into_the_parts_of_a_sum_are_refused_in_every_layout(head_dim, chunks):
    shape = replace(
        preset("llama3:micro", 131), num_heads=16, num_kv_heads=1, head_dim=head_dim, reduction_chunks=chunks
    )
    for tensor in (1, 4):
        world = World(torch.device("cpu"), degrees=dict.fromkeys(AXES, 1) | {"tensor": tensor})
        problem = next(layout_problems(shape, world, ParallelConfig(), CompileConfig()))
        assert f"not divide the {head_dim} features of this model's keys (1 heads of" in problem


def not_a_number_on_one_rank():
    world = open_world(ParallelConfig(), "cpu")
    shape = preset("qwen3:micro", 131)
    fill = partial(initialize, seed=3)
    model = parallel_model(shape, torch.float32, world, ParallelConfig(), CompileConfig(), fill)
    trainer = Trainer(model, TrainConfig(warmup_steps=0, deterministic_layout=True), STEPS, world)
    ended = trainer.optimizer.gradients.end_microbatch

    def spoilt(names):
        if world.rank == 1:
            model.embed_tokens.weight.grad.to_local().view(-1)[:1500:1499] = torch.nan
        ended(names)

    trainer.optimizer.gradients.end_microbatch = spoilt
    before = [local_values(p).clone() for p in model.parameters()]
    metrics = trainer.step([pack([[1, 2, 3, 4]])], NextTokenLoss(6))
    assert metrics["skipped_steps"] == 1 and metrics["grad_norm"] == metrics["grad_norm/embedding"] == math.inf
    assert 0 < metrics["grad_norm/attention"] < math.inf
    assert all(torch.equal(old, local_values(p)) for old, p in zip(before, model.parameters()))

    def infinite(model, row):
        return NextTokenLoss(6)(model, row) + row.tokens[0] * torch.inf - 3 * torch.inf * (row.tokens[0] == 0)

    assert math.isnan(trainer.step([pack([[1, 2, 3]]), pack([[0, 2, 3]])], infinite)["loss"])
    assert trainer.skipped_steps == 2
    close_world(world)


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all():
    launch(2, not_a_number_on_one_rank)


def test_one_large_gradient_costs_the_other_parts_nothing():
    draw = torch.Generator().manual_seed(0)
    grads = {"mlp.up_proj": torch.randn(300_000, generator=draw), "embed_tokens": torch.randn(1000, generator=draw)}
    grads["embed_tokens"][3] = 1e20
    norms = exact_norms(grads)
    # Squares are rounded to 42 bits of the largest.
    for name, part in (("mlp.up_proj", "feed-forward"), ("embed_tokens", "embedding")):
        assert norms[f"grad_norm/{part}"] == pytest.approx(float(grads[name].double().norm()), rel=1e-9)


def run(folder, steps, parallel):
    """A run on this rank up to that step, or what is left of it."""
    data = folder.parent / "text.txt"
    config = PretrainConfig(
        model="qwen3:micro",
        data=str(data),
        steps=steps,
        sequence_length=32,
        tokens_per_step=8 * 32,
        dtype="bfloat16",
        output=str(folder),
        resume=folder.exists(),
        parallel=parallel,
        validation_data=str(data),
        validation_every=2,
        validation_tokens=400,
        train=TrainConfig(
            tokens_per_microbatch=64, warmup_steps=0, schedule="constant", deterministic_layout=True, learning_rate=3e-3
        ),
    )
    pretrain(config)


@pytest.mark.slow
def test_a_run_resumed_in_other_layouts_is_the_run_of_one_process(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question: whether 'tis nobler. " * 60)
    for ranks, steps, folder, parallel in (
        (1, 8, "alone", ParallelConfig()),
        (4, 4, "several", ParallelConfig(tensor=2)),
        (2, 6, "several", ParallelConfig(context=2)),
        (2, 8, "several", ParallelConfig(pipeline=2)),
    ):
        launch(ranks, run, tmp_path / folder, steps, replace(parallel, reduction_chunks=2))
    assert main(["compare", str(tmp_path / "alone"), str(tmp_path / "several")]) == 0
    out = capsys.readouterr().out
    assert "steps compared: 8, from 1 to 8" in out and " at step" not in out, out
    weights = [tmp_path / name / "checkpoints" / "step_00000008" / "model.safetensors" for name in ("alone", "several")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_micro_batches_that_ranks_would_make_smaller_are_refused():
    divide_step(32, 8 * 32, 8 * 32, 2)
    with pytest.raises(UserError, match="rank has 4 rows .*give train.tokens_per_microbatch 128 in all layouts"):
        divide_step(32, 8 * 32, 8 * 32, 2, deterministic=True)
