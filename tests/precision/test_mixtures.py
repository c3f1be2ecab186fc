"""Quantized experts: which they are, the same bits on both sides, and their memory."""

from dataclasses import replace

import pytest
import torch

from lockstep import Engine, SamplingParams, build_model, ops, score
from lockstep.config import RecomputeConfig, TrainConfig
from lockstep.errors import UserError
from lockstep.model import Lora, preset
from lockstep.model.formatted import formatted_weights
from lockstep.parallel.recompute import apply_recompute
from lockstep.precision import KEEP, Precision
from lockstep.rl.dry_run import _panels
from lockstep.rl.scoring.parity_check import check_parity
from lockstep.train import Trainer, pack
from lockstep.train.objective import NextTokenLoss

FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss")
ROWS = [list(range(3, 20)), list(range(60, 75))]


def mixture(family, linear, keep=("lm_head",), dtype="float32", **changes):
    shape = replace(preset(f"{family}:micro"), max_positions=64, precision=Precision(linear, keep), **changes)
    return build_model(shape, dtype, seed=1)


def mixture_in(family, linear, **changes):
    """With no layer in the model's dtype but the head, and of latent attention those whose width is no multiple."""
    narrow = ("*.self_attn.*",) if (family, linear) == ("deepseek_v3", "int4_128") else ()
    return mixture(family, linear, (*narrow, "lm_head"), **changes)


def formats(model):
    return {name: each.format for name, each in formatted_weights(model)}


def experts(model):
    return {name: form for name, form in formats(model).items() if ".experts." in name}


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_have_names_that_patterns_match(family):
    found = formats(mixture(family, "int8", ()))
    parts = ("gate_up", "down") if family == "gpt_oss" else ("gate", "up", "down")
    mixed = range(1, 4) if family == "deepseek_v3" else range(4)
    assert experts(mixture(family, "int8", ())).keys() == {
        f"layers.{i}.mlp.experts.{part}_proj" for i in mixed for part in parts
    }
    assert set(found.values()) == {"int8"}
    some = formats(mixture(family, "int4", ("*.experts.down_proj", "layers.last.*")))
    kept = {name for name, form in some.items() if form == "none"}
    assert kept == {name for name in some if ".experts.down" in name or name.startswith("layers.3.")}
    assert {experts(mixture(family, "int8", KEEP))[f"layers.{i}.mlp.experts.down_proj"] for i in (1, 2)} == {"int8"}


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("kept", ["gate*", "down"])
def test_each_product_of_the_experts_has_its_format(family, kept):
    layer = mixture(family, "int4", (f"*.experts.{kept}_proj", "lm_head")).layers[1].mlp
    x = torch.randn(20, 128, generator=torch.Generator().manual_seed(0))
    of_down, of_others = ("none", "int4") if kept == "down" else ("int4", "none")
    if family == "gpt_oss":
        weights = [dict(layer.experts.named_parameters())[name] for name in ("gate_up_proj", "gate_up_proj_bias")]
        weights += [dict(layer.experts.named_parameters())[name] for name in ("down_proj", "down_proj_bias")]
        expected = ops.clamped_experts(x, *layer.router(x), *weights, (of_others, of_down))
    else:
        of_up = "int4"
        weights = [part.weight for part in (layer.experts.gate_proj, layer.experts.up_proj, layer.experts.down_proj)]
        expected = ops.experts(x, *layer.gate(x), *weights, layer.shared, (of_others, of_up, of_down))
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_have_no_scale_of_all_rows(family):
    """As in torchao, whose float8 training with one scale per tensor converts linear layers alone."""
    found = formats(mixture(family, "float8"))
    assert {form for name, form in found.items() if ".experts." in name} == {"none"}
    assert {form for name, form in found.items() if ".experts." not in name} == {"float8"}


def test_experts_that_cannot_be_quantized_are_refused_by_name():
    shape = preset("qwen3_moe:micro")
    odd = replace(shape.experts, intermediate_size=48)
    with pytest.raises(UserError, match=r"multiple of 32, but that of layers.0.mlp.experts.down_proj is 48; add it to"):
        mixture("qwen3_moe", "mxfp8", experts=odd)
    assert "none" in experts(mixture("qwen3_moe", "mxfp8", ("*.down_proj", "lm_head"), experts=odd)).values()


QUICK = {("qwen3_moe", "int8"), ("deepseek_v3", "int4"), ("gpt_oss", "mxfp8"), ("qwen3_moe", "float8_rowwise")}
CASES = [
    pytest.param(family, linear, marks=[] if (family, linear) in QUICK else [pytest.mark.slow])
    for family in FAMILIES
    for linear in ("int8", "int4", "int4_128", "float8_rowwise", "mxfp8", "mxfp8_floor")
]


@pytest.mark.parametrize(("family", "linear"), CASES)
def test_trainer_and_generator_of_a_mixture_agree_under_a_mixed_load(family, linear):
    model = mixture_in(family, linear, dtype="bfloat16" if linear == "int4" else "float32")
    assert set(experts(model).values()) == {linear}
    parity, load = check_parity(model, tokens=64)
    assert (parity.tokens_checked >= 64, parity.tokens_different) == (True, 0)
    assert load["preemptions"] > 0 and load["reused prompt tokens"] > 0


@pytest.mark.parametrize(("family", "linear"), CASES)
def test_recorded_steps_follow_quantized_experts(family, linear):
    """Lone prompts, long enough for steps to be recorded; then other weights, in the same memory."""
    model = mixture_in(family, linear)
    engine, params = Engine(model), SamplingParams(max_tokens=30, temperature=0.9, seed=1, ignore_eos=True)
    seen = []
    for version in range(2):
        ((completion,),) = engine.generate([[5, 6, 7]], params)
        (scores,) = score(model, [[5, 6, 7, *completion.token_ids]], 0.9)
        assert torch.equal(scores[2:], torch.tensor(completion.logprobs))
        seen.append(completion.logprobs)
        with torch.no_grad():
            dict(formatted_weights(model))["layers.1.mlp.experts.down_proj"].weight.mul_(3)
        engine.weights_changed(version)
    assert seen[0] != seen[1]


@pytest.mark.parametrize(("family", "linear"), CASES)
def test_training_lowers_the_loss_of_a_mixture(family, linear):
    model = mixture_in(family, linear, num_layers=2)
    trainer = Trainer(model, TrainConfig(learning_rate=1e-2, warmup_steps=0, schedule="constant"), 10)
    losses = [trainer.step([pack(ROWS)], NextTokenLoss(30))["loss"] for _ in range(10)]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("family", "linear", "mode"),
    [
        ("qwen3_moe", "int8", "selective"),
        ("gpt_oss", "int4", "none"),
        *(pytest.param("qwen3_moe", "int4", mode, marks=pytest.mark.slow) for mode in ("none", "full")),
        *(pytest.param("gpt_oss", "int8", mode, marks=pytest.mark.slow) for mode in ("full", "selective")),
    ],
)
def test_an_adapter_of_a_packed_mixture_is_trained_to_the_same_bits(family, linear, mode):
    """In less memory, and sampled from as it is trained."""
    modules = tuple(f"layers.{i}.self_attn.{part}" for i in range(2) for part in ("q_proj", "o_proj"))
    results, sizes = [], []
    for packed in (False, True):
        model = mixture(family, linear, ("layers.1.*", "lm_head"), num_layers=2, lora=Lora(4, 8.0, modules))
        if packed:
            model.pack_frozen()
        stacked = [each.weight for name, each in formatted_weights(model) if ".experts." in name]
        assert {isinstance(weight, ops.PackedWeight) for weight in stacked} == {False, packed}
        apply_recompute(model, RecomputeConfig(mode))
        trainer = Trainer(model, TrainConfig(learning_rate=1e-2, warmup_steps=0), 5)
        losses = [trainer.step([pack(ROWS)], NextTokenLoss(30))["loss"] for _ in range(3)]
        results.append((losses, [p.tolist() for p in model.parameters() if p.requires_grad]))
        sizes.append(sum(weight.nbytes for weight in stacked))
    assert check_parity(model, tokens=64)[0].tokens_different == 0
    assert results[0] == results[1] and results[0][0][0] > results[0][0][-1]
    assert sizes[1] < (0.65 if linear == "int8" else 0.6) * sizes[0]  # of float32; one layer of two is not packed


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_dry_run_counts_what_an_engine_packs(family):
    model = mixture(family, "int4", ("layers.1.*", "lm_head"))
    engine = Engine(model)
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    assert sum(packed.panels.nbytes for packed in engine._weights._panels.values()) == _panels(model)
