"""What cannot work is refused by name before a weight exists, with what would work."""

from dataclasses import replace

import pytest
import torch

from lockstep.config import (
    CompileConfig,
    ParallelConfig,
    PrecisionConfig,
    PretrainConfig,
    RecomputeConfig,
    TrainConfig,
    validate,
)
from lockstep.data import divide_step
from lockstep.errors import UserError
from lockstep.model import preset
from lockstep.model.config import Lora
from lockstep.parallel import open_world
from lockstep.parallel.pipeline_schedule import PipelinePlan, split_layers
from lockstep.parallel.refusals import refuse_impossible
from lockstep.parallel.world import AXES, World, resolve_degrees
from lockstep.precision import Precision
from lockstep.train.refusals import layout_problems
from lockstep.train.setup import trained_model

P = ParallelConfig


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (dict(parallel=P(tensor=3)), "parallel.tensor is 3; give 1, 2, 4 "),
        (dict(parallel=P(tensor=4, reduction_chunks=3)), r"reduction_chunks is 3; .* at least parallel.tensor \(4\)"),
        (dict(sequence_length=12, parallel=P(context=8)), "sequence_length 12 cannot .* parallel.context 8: .* 16 tok"),
        (dict(parallel=P(expert=2), recompute=RecomputeConfig("budget", budget_gib=1.0)), '"budget" does not work'),
        (dict(parallel=P(expert=2), compile=CompileConfig("inductor")), "compiled layers do not work"),
        (dict(parallel=P(expert=2), train=TrainConfig(deterministic_layout=True)), "deterministic_layout does not"),
        (
            dict(precision=PrecisionConfig("float8"), train=TrainConfig(deterministic_layout=True)),
            "deterministic_layout does not work with precision.linear float8",
        ),
        (dict(recompute=RecomputeConfig("every", every=0)), "every is 0"),
        (dict(recompute=RecomputeConfig("budget")), "budget needs a number above 0"),
        (dict(recompute=RecomputeConfig("selective", keep=("sorting",))), 'no operator "sorting"'),
        (
            dict(recompute=RecomputeConfig("selective", keep=("linear",)), compile=CompileConfig("inductor")),
            "keep only",
        ),
    ],
)
def test_settings_that_no_model_can_have_are_refused(settings, said):
    with pytest.raises(UserError, match=said):
        validate(PretrainConfig(**settings))


def test_settings_that_fit_are_accepted():
    validate(PretrainConfig(parallel=P(tensor=4), sequence_length=25))
    validate(PretrainConfig(parallel=P(reduction_chunks=4)))
    shape = replace(preset("qwen3_moe:micro", 258), reduction_chunks=4, num_kv_heads=4, intermediate_size=6)
    refuse_impossible(shape, dict.fromkeys(AXES, 1) | {"tensor": 4}, P(tensor=4))  # features of experts are not cut
    refuse_impossible(replace(preset("qwen3:micro", 258), reduction_chunks=2), {"tensor": 2}, P(tensor=2))
    assert resolve_degrees(P(tensor=2), 8)["data_shard"] == 4
    divide_step(32, 8 * 32, 8 * 32, 2)


WIDE = dict(vocab_size=9, num_heads=8, num_kv_heads=8, reduction_chunks=8)
FOUR = dict(reduction_chunks=4, num_kv_heads=4)


@pytest.mark.parametrize(
    ("model", "changes", "parallel", "said"),
    [
        ("qwen3", {}, P(tensor=3), "tensor 3 does not divide 4 attention heads, 2 key-value .*set it to 1 or 2"),
        ("qwen3", {}, P(tensor=2), "reduction_chunks 1 is too small for parallel.tensor 2"),
        ("qwen3", WIDE, P(tensor=8), "tensor 8 leaves a rank with none of the 9 tokens"),
        ("qwen3", {}, P(expert=2), "parallel.expert is 2, but the model has no experts"),
        ("qwen3_moe", {}, P(expert=3), "parallel.expert 3 does not divide the 8 experts; set .* to 1 or 2 or 4 or 8"),
        ("qwen3_moe", FOUR, P(expert=4, tensor=4), "expert 4 x parallel.tensor 4 does not .* 8 experts; .* to 1 or 2"),
        ("qwen3_moe", FOUR | {"experts": 6}, P(tensor=4), "tensor 4 does not divide 6 experts; set it to 1 or 2"),
        ("phi3", dict(reduction_chunks=4), P(tensor=4), "tensor 4 does not divide 2 key-value heads; set it to 1 or 2"),
        ("phi3", dict(reduction_chunks=2, qkv_bias=True), P(tensor=2), "tensor 2 does not work with fused .* biases"),
    ],
)
def test_degrees_that_do_not_divide_the_model_are_refused_with_those_that_do(model, changes, parallel, said):
    shape = preset(f"{model}:micro", 258)
    if "experts" in changes:
        changes = changes | {"experts": replace(shape.experts, count=changes["experts"])}
    with pytest.raises(UserError, match=said):
        refuse_impossible(replace(shape, **changes), dict.fromkeys(AXES, 1) | {"tensor": parallel.tensor}, parallel)


@pytest.mark.parametrize(
    ("parallel", "ranks", "said"),
    [
        (P(tensor=3), 4, "tensor 3 = 3 ranks, but 4 are running; start 3 with torchrun --nproc-per-node 3"),
        (P(context=0), 1, "parallel.context is 0; it must be 1 or more"),
        (P(expert=4, context=2), 6, "expert is 4; it must divide the 6 ranks of data_shard 3 x context 2.*1 or 2"),
    ],
)
def test_degrees_that_do_not_fit_the_ranks_are_refused(parallel, ranks, said):
    with pytest.raises(UserError, match=said):
        resolve_degrees(parallel, ranks)


def test_offloading_to_the_cpu_is_refused_on_a_cpu():
    with pytest.raises(UserError, match="cpu_offload is for CUDA devices"):
        open_world(P(cpu_offload=True), "cpu")
    config = PretrainConfig(recompute=RecomputeConfig("offload"))
    with pytest.raises(UserError, match='"offload" is for CUDA devices'):
        trained_model(config, preset("qwen3:micro"), open_world(P(), "cpu"), lambda model: None)


@pytest.mark.parametrize(
    ("settings", "count", "said"),
    [
        ({"pipeline_schedule": "1f1b"}, 3, '3 micro-batches per rank, but .* "1f1b" on 4 ranks needs 4 or more'),
        ({"pipeline_schedule": "dualpipev"}, 7, "needs 8 or more"),
        ({"pipeline_schedule": "interleaved"}, 9, "needs a multiple of 4"),
        ({"pipeline_schedule": "zbv", "reshard_after_forward": "always"}, 4, "halves of the backward"),
        ({"pipeline_schedule": "zbv"}, 4, 'set compile.backend = "none"'),
    ],
)
def test_pipelines_that_cannot_run_are_refused(settings, count, said):
    with pytest.raises(UserError, match=said):
        plan = PipelinePlan(P(pipeline=4, **settings))
        plan.check_microbatches(count)
        plan.check_compile(CompileConfig("inductor"))


@pytest.mark.parametrize(
    ("layers", "stages", "split", "said"),
    [
        (3, 4, "", "4 stages needs at least as many layers, but the model has 3; lower parallel.pipeline"),
        (6, 2, "norm", 'no stage can begin with "norm"; name layers.1 to layers.5'),
        (6, 3, "layers.2", '"layers.2" does not make 3 stages; name the 2 layers'),
    ],
)
def test_splits_of_layers_that_cannot_be_are_refused(layers, stages, split, said):
    with pytest.raises(UserError, match=said):
        split_layers(layers, stages, P(pipeline_split=split))


NO_KEYS = {"num_heads": 16, "num_kv_heads": 1}


@pytest.mark.parametrize(
    ("degrees", "others", "said"),
    [
        ({"data_shard": 3, "data_replicate": 2}, {}, "power of two and is 3; set parallel.data_replicate to 1"),
        ({"data_shard": 4}, {"device": "cuda"}, "up to 2 GPUs so far, not 4"),
        ({"tensor": 2}, {"device": "cuda"}, "with parallel.tensor 2 only works on CPUs so far, not on cuda"),
        ({"data_shard": 4}, {"full_dtensor": True}, "does not work with parallel.full_dtensor over data-parallel"),
        ({"tensor": 4}, {}, "with parallel.tensor 4 does not work with fewer key-value heads (2)"),
        ({"tensor": 2}, {"precision": Precision("mxfp8")}, "tensor 2 does not work with precision.linear mxfp8"),
        ({"tensor": 2}, {"model": "phi3:micro"}, "does not work with fused projections (qkv_proj, gate_up_proj)"),
        ({"context": 2}, {"model": "qwen3_moe:micro"}, "parallel.context 2 only works for dense models so far"),
        ({"context": 2}, {"lora": Lora(4, 8.0, ("lm_head",))}, "does not work with an adapter of the head yet"),
        ({}, NO_KEYS | {"head_dim": 6, "reduction_chunks": 4}, "not divide the 6 features of this model's keys"),
        ({}, NO_KEYS | {"head_dim": 20, "reduction_chunks": 4}, "not divide the 20 features of this model's keys"),
        ({"tensor": 4}, NO_KEYS | {"head_dim": 4, "reduction_chunks": 8}, "not divide the 4 features of this model's"),
    ],
)
def test_layouts_whose_gradients_have_no_fixed_order_are_refused(degrees, others, said):
    shape = preset(others.get("model", "qwen3:micro"), 131)
    shape = replace(shape, **{name: value for name, value in others.items() if hasattr(shape, name)})
    world = World(torch.device(others.get("device", "cpu")), dict.fromkeys(AXES, 1) | degrees)
    assert said in next(layout_problems(shape, world, P(full_dtensor=others.get("full_dtensor", False))))


def test_micro_batches_that_ranks_would_make_smaller_are_refused():
    with pytest.raises(UserError, match="rank has 4 rows .*give train.tokens_per_microbatch 128 in all layouts"):
        divide_step(32, 8 * 32, 8 * 32, 2, deterministic=True)
