"""With `train.deterministic_layout` a run has the same bits in every layout, whatever the model has."""

import math
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from lockstep import ops
from lockstep.cli import main
from lockstep.config import CompileConfig, ParallelConfig, PretrainConfig, TrainConfig
from lockstep.model import ExpertsConfig, Latent, ModelConfig, initialize, preset
from lockstep.model.shard import local_values
from lockstep.ops import Routing, head_gradients
from lockstep.parallel import close_world, open_world, parallel_model
from lockstep.precision import Precision
from lockstep.train import Trainer, pack
from lockstep.train.gradient_norm import exact_norms
from lockstep.train.objective import NextTokenLoss
from lockstep.train.pretrain import pretrain
from tests.parallel import training
from tests.parallel.launch import launch
from tests.parallel.training import assert_log_probs, assert_same_bits

P = ParallelConfig
VOCAB = 131
LATENT = replace(
    preset("deepseek_v3:micro", VOCAB), dim=64, intermediate_size=96, head_dim=48,
    latent=Latent(32, 16, 16, 24, q_rank=40), experts=None,
)  # fmt: skip
ROUTING = Routing(2, "sigmoid", groups=4, groups_kept=2)
CHOICE_BIAS = "layers.1.mlp.gate.e_score_correction_bias"
SHAPES = {
    "a tied head": preset("qwen3:micro", VOCAB),
    "a capped head": replace(preset("qwen3:micro", VOCAB), logits_softcap=2.0),
    "biases, sinks and windows": ModelConfig(
        "qwen3", VOCAB, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=128,
        qkv_bias=True, output_bias=True, sinks=True, windows=(20, 0), max_positions=512,
    ),
    "gpt-oss": preset("gpt_oss:micro", VOCAB),
    "latent attention": LATENT,
    "a biased choice of experts": replace(
        LATENT, experts=ExpertsConfig(8, 48, ROUTING, 48, choice_bias=True, dense_layers=(0,))
    ),
    "a mixture": preset("qwen3_moe:micro", VOCAB),
    "a shared expert with a gate": replace(
        preset("qwen3_moe:micro", VOCAB), experts=ExpertsConfig(8, 48, Routing(2), 48, shared_gate=True)
    ),
    "4 key-value heads": replace(preset("qwen3:micro", VOCAB), num_heads=8, num_kv_heads=4),
    # With the head, which is tied.
    "int8": replace(preset("qwen3:micro", VOCAB), num_heads=8, num_kv_heads=4, precision=Precision("int8", ())),
    "int4": replace(preset("qwen3:micro", VOCAB), num_heads=8, num_kv_heads=4, precision=Precision("int4", ())),
}  # fmt: skip
SETTINGS = {"deterministic_layout": True, "max_grad_norm": 0.3, "learning_rate": 3e-3}
FROZEN = SETTINGS | {"rules": ("embed_tokens* frozen=true",)}
MUON = SETTINGS | {"optimizer": "muon"}
# A step that bfloat16 would round away beside 0.01.
BIASED = SETTINGS | {"router_bias_rate": 1e-5, "learning_rate": 1e-4}
ODD = (29, 33, 31, 32) * 6
"""Sequences of twelve micro-batches, which three ranks and six can share."""


def train(parallel, shape, dtype, settings, torch_2_15=False, **others):
    # Targets in several slices of the head, and sums over slices that context ranks share unevenly.
    head_gradients.SLICE_BYTES = 7 * VOCAB * 4
    if torch_2_15:
        as_torch_2_15()
    others = {"steps": 2, "layers": 4 if "pipeline" in shape else 2} | others
    model = SHAPES[shape.removesuffix(", pipeline")]
    return training.train(parallel, dtype, model=model, vocab=VOCAB, tied=None, settings=settings, **others)


@cache
def alone(chunks, shape, dtype, settings, **others):
    run = partial(train, shape=shape, dtype=dtype, settings=dict(settings), **others)
    (trace,) = launch(1, run, P(reduction_chunks=chunks), seconds=600)
    assert trace.norms[0] > 0.3, "gradients are clipped"
    assert trace.losses[0] > trace.losses[-1], "it learns, so each step's bits depend on all before it"
    return trace


def check(ranks, parallel, shape, dtype="float32", settings=SETTINGS, torch_2_15=False, **others):
    chunks = 2 if parallel.tensor == 1 else parallel.tensor
    expected = alone(chunks, shape, dtype, tuple(settings.items()), **others)
    run = partial(train, shape=shape, dtype=dtype, settings=settings, torch_2_15=torch_2_15, **others)
    traces = launch(ranks, run, replace(parallel, reduction_chunks=chunks), seconds=600, fresh=torch_2_15)
    assert_same_bits(traces, expected)
    assert_log_probs(traces, expected, parallel.tensor)
    return expected


@pytest.mark.parametrize(
    ("shape", "ranks", "parallel", "dtype", "settings"),
    [
        ("a tied head", 4, P(data_replicate=2), "bfloat16", MUON),
        ("a tied head, pipeline", 4, P(pipeline=2, pipeline_schedule="zbv"), "float32", SETTINGS),
        pytest.param("a tied head, pipeline", 2, P(pipeline=2), "float32", FROZEN, marks=pytest.mark.slow),
        ("biases, sinks and windows", 4, P(context=2, tensor=2), "float32", SETTINGS),
        ("a capped head", 4, P(context=2, tensor=2), "float32", SETTINGS),
        ("gpt-oss", 2, P(tensor=2), "bfloat16", SETTINGS),
        ("latent attention", 2, P(context=2), "float32", SETTINGS),
        ("a biased choice of experts", 2, P(), "bfloat16", BIASED),
        ("a shared expert with a gate", 2, P(tensor=2), "float32", SETTINGS),
        pytest.param("a shared expert with a gate", 2, P(), "bfloat16", MUON, marks=pytest.mark.slow),
        ("int8", 4, P(context=2, tensor=2), "float32", SETTINGS),
        ("int4", 2, P(tensor=2, full_dtensor=True), "bfloat16", SETTINGS),
    ],
)
def test_steps_have_the_bits_of_one_process(shape, ranks, parallel, dtype, settings):
    trace = check(ranks, parallel, shape, dtype, settings)
    if settings is BIASED:
        bias = trace.weights[CHOICE_BIAS]
        assert bias.dtype == torch.float32 and 0 < bias.abs().max() <= 2.01e-5, "it moved, by steps of its own"


LAYOUTS = {
    "FSDP 2": (2, P()),
    "DDP 2": (2, P(data_replicate=2)),
    "FSDP 4": (4, P()),
    "HSDP 2 x 2": (4, P(data_replicate=2)),
    "DDP 4": (4, P(data_replicate=4)),
    "TP 2": (2, P(tensor=2)),
    "CP 2": (2, P(context=2)),
    "PP 2, interleaved": (2, P(pipeline=2, pipeline_schedule="interleaved")),
    "PP 2, ZBV": (2, P(pipeline=2, pipeline_schedule="zbv")),
    "FSDP 2 x PP 2, 1F1B": (4, P(pipeline=2)),
    "FSDP 2 x PP 2, ZBV": (4, P(pipeline=2, pipeline_schedule="zbv")),
    "FSDP 2 x TP 2": (4, P(tensor=2)),
    "FSDP 2 x CP 2": (4, P(context=2)),
    "CP 2 x TP 2": (4, P(context=2, tensor=2)),
    "TP 2 x PP 2": (4, P(tensor=2, pipeline=2)),
    "full DTensor": (4, P(context=2, tensor=2, full_dtensor=True)),
}
ODD_LAYOUTS = {
    "FSDP 3": (3, P()),
    "DDP 3": (3, P(data_replicate=3)),
    "HSDP 2 x 3": (6, P(data_replicate=3)),
    "FSDP 3 x TP 2": (6, P(tensor=2)),
    "FSDP 3 x CP 2": (6, P(context=2)),
    "FSDP 3 x PP 2, ZBV": (6, P(pipeline=2, pipeline_schedule="zbv")),
}
OTHERS = [
    ("biases, sinks and windows", 2, P()),
    ("biases, sinks and windows", 2, P(tensor=2)),
    ("biases, sinks and windows", 2, P(pipeline=2)),
    ("biases, sinks and windows", 4, P(context=2, tensor=2, full_dtensor=True)),
    ("a capped head", 2, P(tensor=2)),
    ("a capped head", 2, P(pipeline=2)),
    ("gpt-oss", 2, P()),
    ("gpt-oss", 2, P(pipeline=2)),
    ("gpt-oss", 2, P(tensor=2, full_dtensor=True)),
    ("latent attention", 2, P()),
    ("latent attention, pipeline", 2, P(pipeline=2, pipeline_schedule="zbv")),
    ("a mixture", 2, P(tensor=2)),
    ("a mixture", 4, P(tensor=2)),
    ("4 key-value heads", 4, P(tensor=4)),
    ("4 key-value heads", 8, P(context=2, tensor=4)),
]
OF_FORMATS = [
    (2, P(tensor=2)),
    (4, P(tensor=4)),
    (4, P(tensor=2)),
    (4, P(context=2, data_replicate=2)),
    (2, P(context=2, full_dtensor=True)),
    (4, P(context=2, tensor=2, full_dtensor=True)),
]
OTHERS += [(format, *layout) for format in ("int8", "int4") for layout in OF_FORMATS]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "settings"), [("float32", SETTINGS), ("bfloat16", MUON)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_steps_have_the_bits_of_one_process_in_every_layout(layout, dtype, settings):
    check(*LAYOUTS[layout], "a tied head, pipeline", dtype, settings, steps=20)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ODD_LAYOUTS)
def test_steps_have_the_bits_of_one_process_where_a_round_of_micro_batches_is_no_subtree(layout):
    check(*ODD_LAYOUTS[layout], "a tied head, pipeline", steps=3, lengths=ODD)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("shape", "ranks", "parallel"), OTHERS)
def test_steps_of_other_models_have_the_bits_of_one_process(shape, ranks, parallel, dtype):
    check(ranks, parallel, shape, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        ("TP 2", "a tied head"), ("CP 2 x TP 2", "a tied head"), ("full DTensor", "a tied head"), ("TP 2", "int8"),
        ("FSDP 2 x PP 2, 1F1B", "a tied head, pipeline"), ("TP 2", "biases, sinks and windows"),
    ],
)  # fmt: skip
def test_compiled_steps_have_the_bits_of_one_compiled_process(layout, shape):
    check(*LAYOUTS[layout], shape, compiled=True)


def as_torch_2_15() -> None:
    """In this process, autograd widens a gathered weight's gradient itself, and FSDP has no copy of it to set."""
    prepared = FSDPParam.init_unsharded_param

    def prepare(self):
        prepared(self)
        if self.reduce_dtype is not None:
            self._unsharded_param.grad_dtype = self.reduce_dtype

    def never_set(self, value):
        if hasattr(self, "_unsharded_param"):
            raise AttributeError("property 'unsharded_accumulated_grad' of 'FSDPParam' object has no setter")

    FSDPParam.init_unsharded_param = prepare
    FSDPParam.unsharded_accumulated_grad = property(lambda self: None, never_set)
    FSDPParam.to_accumulated_grad_if_needed = lambda self: None
    FSDPParam.accumulate_unsharded_grad_if_needed = lambda self: None


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["FSDP 4", "TP 2", "PP 2, ZBV"])
def test_a_tied_embeddings_gradient_has_the_bits_of_one_process_where_autograd_widens_it(layout):
    check(*LAYOUTS[layout], "a tied head, pipeline", "bfloat16", torch_2_15=True)


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


def not_a_number_on_one_rank():
    world = open_world(ParallelConfig(), "cpu")
    shape = preset("qwen3:micro", VOCAB)
    fill = partial(initialize, seed=3)
    model = parallel_model(shape, torch.float32, world, ParallelConfig(), CompileConfig(), fill)
    trainer = Trainer(model, TrainConfig(warmup_steps=0, deterministic_layout=True), 20, world)
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
        model="qwen3:micro", data=str(data), steps=steps, sequence_length=32, tokens_per_step=8 * 32, dtype="bfloat16",
        output=str(folder), resume=folder.exists(), parallel=parallel,
        validation_data=str(data), validation_every=2, validation_tokens=400,
        train=TrainConfig(
            tokens_per_microbatch=64, warmup_steps=0, schedule="constant", deterministic_layout=True, learning_rate=3e-3
        ),
    )  # fmt: skip
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
    assert "steps compared: 8, from 1 to 8" in capsys.readouterr().out
    weights = [tmp_path / name / "checkpoints" / "step_00000008" / "model.safetensors" for name in ("alone", "several")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
