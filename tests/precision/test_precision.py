"""Quantized layers: which they are, the same bits on both sides, and folders that remember them."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from lockstep import Engine, SamplingParams, build_model, load_model, ops, save_model, score
from lockstep.checkpoint import open_model
from lockstep.config import DPOConfig, ParallelConfig, PrecisionConfig, PretrainConfig, RecomputeConfig, TrainConfig
from lockstep.errors import UserError
from lockstep.model import Lora, preset
from lockstep.model.layers import projections
from lockstep.parallel import open_world
from lockstep.parallel.recompute import apply_recompute
from lockstep.parallel.refusals import refuse_generators, refuse_impossible
from lockstep.precision import KEEP, MULTIPLES, Precision, read_precision
from lockstep.rl.generators.models import frozen_model
from lockstep.rl.scoring.parity_check import check_parity
from lockstep.train import Trainer, pack
from lockstep.train.dpo import reference_model
from lockstep.train.objective import NextTokenLoss

SHAPE = replace(preset("qwen3:micro"), max_positions=64)
INTEGERS = ("int8", "int4", "int4_128")
FLOAT8 = ("float8_rowwise", "float8_rowwise_gw_hp", "mxfp8", "mxfp8_floor")
QUANTIZED = [Precision(linear, keep=()) for linear in INTEGERS] + [Precision(linear, ("lm_head",)) for linear in FLOAT8]
SIMILAR = ("int4_128", "float8_rowwise_gw_hp", "mxfp8_floor")
"""To others, with the same forward or another size of groups."""
PARAMETERS = [
    pytest.param(each, marks=[pytest.mark.slow] if each.linear in SIMILAR else [], id=each.linear) for each in QUANTIZED
]
DTYPES = ("float32", "bfloat16")


def model_in(precision, dtype="float32", **changes):
    return build_model(replace(SHAPE, precision=precision, **changes), dtype, seed=1)


def formats(model):
    return {name: layer.precision for name, layer in projections(model)} | {"lm_head": model.head_format}


def test_a_layer_keeps_the_models_dtype_by_its_name():
    assert set(formats(model_in(Precision())).values()) == {"none"}
    found = formats(model_in(Precision("int8")))
    assert {name for name, form in found.items() if form == "none"} == {
        name for name in found if name.startswith(("layers.0.", "layers.3.", "lm_head"))
    }
    everything = formats(model_in(Precision("int4", keep=()), num_layers=12))
    assert set(everything.values()) == {"int4"}
    some = formats(model_in(Precision("int8", keep=("*.down_proj", "layers.1.*", "layers.last.*")), num_layers=12))
    kept = {name for name, form in some.items() if form == "none"}
    assert kept == {name for name in some if "down_proj" in name or name.startswith(("layers.1.", "layers.11."))}


def test_every_format_has_its_operators():
    assert MULTIPLES.keys() == ops.FORMATS.keys()
    for name, multiple in MULTIPLES.items():
        x = torch.ones(2, 384 if multiple == 1 else multiple)
        torch.testing.assert_close(ops.FORMATS[name].linear(x, x, 1), torch.full((2, 2), float(x.shape[1])))


def test_settings_choose_and_a_folder_remembers(tmp_path):
    trained = Precision("int4", keep=("lm_head",))
    for compared in (False, True):
        assert PrecisionConfig().of_model(trained, compared) == trained
        assert PrecisionConfig("none").of_model(trained, compared).linear == "none"
        assert PrecisionConfig("int8").of_model(trained, compared) == Precision("int8", KEEP)
    # One scale for all rows: what it trained is sampled from in the model's dtype.
    assert PrecisionConfig().of_model(Precision("float8"), compared=False).linear == "float8"
    assert PrecisionConfig().of_model(Precision("float8"), compared=True).linear == "none"
    with pytest.raises(UserError, match="precision.keep lists layers .*; give precision.linear too"):
        PrecisionConfig(keep=("*.down_proj",)).of_model(trained, compared=False)
    with pytest.raises(UserError, match="float8 has one scale for all rows of a micro-batch.*use float8_rowwise"):
        PrecisionConfig("float8").of_model(trained, compared=True)
    save_model(model_in(trained), tmp_path)
    assert load_model(tmp_path).config.precision == trained
    other = open_model(tmp_path, precision=PrecisionConfig("int8", keep=()))
    assert other.config.precision == Precision("int8", ()) and set(formats(other).values()) == {"int8"}
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.float32, "transformers ignores it"
    save_model(model_in(Precision()), tmp_path / "plain")
    assert "precision" not in json.loads((tmp_path / "plain" / "config.json").read_text())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", PARAMETERS)
def test_trainer_and_generator_agree_under_a_mixed_load(precision, dtype):
    parity, load = check_parity(model_in(precision, dtype), tokens=64)
    assert (parity.tokens_checked >= 64, parity.tokens_different) == (True, 0)
    assert load["preemptions"] > 0 and load["reused prompt tokens"] > 0


@pytest.mark.parametrize("linear", INTEGERS)
def test_recorded_steps_look_tokens_up_in_integers(linear):
    model = model_in(Precision(linear, ()))
    prompt, params = [5, 6, 7], SamplingParams(max_tokens=30, temperature=0.9, seed=1, ignore_eos=True)
    ((expected,),) = Engine(model).generate([prompt], params)
    model.requires_grad_(False).pack_frozen()
    ((completion,),) = Engine(model).generate([prompt], params)
    assert completion == expected
    assert torch.equal(score(model, [prompt + expected.token_ids], 0.9)[0][2:], torch.tensor(expected.logprobs))


@pytest.mark.parametrize("precision", PARAMETERS)
def test_recorded_steps_follow_quantized_weights(precision):
    """Lone prompts, long enough for steps to be recorded; then other weights, in the same memory."""
    model = model_in(precision)
    engine, params = Engine(model), SamplingParams(max_tokens=30, temperature=0.9, seed=1, ignore_eos=True)
    seen, packing = [], [0.0]
    for version in range(2):
        ((completion,),) = engine.generate([[5, 6, 7]], params)
        (scores,) = score(model, [[5, 6, 7, *completion.token_ids]], 0.9)
        assert torch.equal(scores[2:], torch.tensor(completion.logprobs))
        seen.append(completion.logprobs)
        packing.append(engine.statistics.packing_seconds)
        with torch.no_grad():
            model.layers[1].mlp.up_proj.weight.mul_(3)
        engine.weights_changed(version)
    assert seen[0] != seen[1] and packing[0] < packing[1] < packing[2]


@pytest.mark.parametrize("precision", [*PARAMETERS, pytest.param(Precision("float8"), id="float8")])
def test_training_lowers_the_loss(precision):
    model = model_in(precision)
    trainer = Trainer(model, TrainConfig(learning_rate=3e-3, warmup_steps=0, schedule="constant"), 30)
    row = pack([list(range(3, 40)), list(range(60, 90))])
    losses = [trainer.step([row], NextTokenLoss(65))["loss"] for _ in range(30)]
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
@pytest.mark.parametrize("linear", ["int8", "int4"])
def test_an_adapter_of_a_packed_base_is_trained_to_the_same_bits(linear, mode):
    """In less memory, and sampled from as it is trained."""
    modules = tuple(f"layers.{i}.{part}" for i in range(4) for part in ("self_attn.q_proj", "mlp.down_proj"))
    results, sizes = [], []
    for packed in (False, True):
        model = model_in(Precision(linear, keep=("layers.3.*",)), lora=Lora(4, 8.0, modules))
        if packed:
            model.pack_frozen()
        assert {isinstance(layer.weight, ops.PackedWeight) for _, layer in projections(model)} == {False, packed}
        apply_recompute(model, RecomputeConfig(mode))
        trainer = Trainer(model, TrainConfig(learning_rate=1e-2, warmup_steps=0), 5)
        row = pack([list(range(3, 40)), list(range(60, 90))])
        losses = [trainer.step([row], NextTokenLoss(65))["loss"] for _ in range(3)]
        results.append((losses, [p.tolist() for p in model.parameters() if p.requires_grad]))
        sizes.append(sum(layer.weight.nbytes for _, layer in projections(model)))
    assert check_parity(model, tokens=64)[0].tokens_different == 0
    assert results[0] == results[1] and results[0][0][0] > results[0][0][-1]
    assert sizes[1] < (0.5 if linear == "int8" else 0.4) * sizes[0]  # of float32; a quarter of the layers is not packed


@pytest.mark.parametrize("linear", INTEGERS)
def test_an_embedding_has_the_numbers_of_the_head_that_is_tied_to_it(linear):
    """And that of a head of its own is not quantized."""
    tokens = torch.tensor([3, 257, 0, 3, 77])
    for tied, precision in ((True, ()), (False, ()), (True, ("lm_head",))):
        model = model_in(Precision(linear, precision), tie_embeddings=tied)
        weight = model.embed_tokens.weight
        rounded = ops.FORMATS[linear].rounded_weight(weight) if tied and not precision else weight
        assert torch.equal(model.embed(tokens), rounded[tokens])
        model.embed(tokens)[:, 1].sum().backward()
        assert weight.grad[:, 1].tolist() == torch.bincount(tokens, minlength=len(weight)).tolist()
        assert weight.grad[:, 0].count_nonzero() == 0
    packed = model_in(Precision(linear, ())).requires_grad_(False)
    expected = packed.embed(tokens)
    packed.pack_frozen()
    assert torch.equal(packed.embed(tokens), expected) and isinstance(packed.head_weight, ops.PackedWeight)
    with pytest.raises(IndexError, match="row 258 .* of a weight with 258 rows"):
        packed.embed(torch.tensor([0, 258]))


def test_a_head_has_the_gradients_of_its_rounded_factors():
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(50, 64, generator=generator), torch.randn(300, 64, generator=generator)
    targets = torch.randint(300, (50,), generator=generator)
    for name in ("none", "int8", "int4"):
        form = ops.FORMATS[name]
        factors = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
        rounded = [form.rounded_rows(hidden).requires_grad_(), form.rounded_weight(head).requires_grad_()]
        log_probs, _ = ops.token_log_probs(*factors, targets, 0.7, ops.HeadTerms(name))
        logits = form.linear(hidden, head, 1)
        assert torch.equal(log_probs, ops.logits_log_probs(logits, targets, torch.full((50,), 1 / 0.7))[0])
        expected, _ = ops.token_log_probs(*rounded, targets, 0.7)
        for total, of_rounded in ((log_probs.sum(), expected.sum()), (None, None)):
            total = ops.log_prob_sum(*factors, targets, 0.5, ops.HeadTerms(name)) if total is None else total
            of_rounded = ops.log_prob_sum(*rounded, targets, 0.5) if of_rounded is None else of_rounded
            gradients = torch.autograd.grad(total, factors), torch.autograd.grad(of_rounded, rounded)
            for ours, theirs in zip(*gradients):
                torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)  # logits are summed otherwise


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("int8", "precision is 'int8'; it must have the keys linear and keep"),
        ({"linear": "int8"}, "must have the keys linear and keep"),
        ({"linear": "int7", "keep": []}, 'precision "int7" is unknown. Did you mean "int8"'),
    ],
)
def test_a_folder_with_another_precision_is_refused(tmp_path, value, said):
    save_model(model_in(Precision()), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"precision": value}))
    with pytest.raises(UserError, match=said):
        load_model(tmp_path)
    with pytest.raises(UserError, match=said):
        read_precision(value, "config.json")


def test_what_cannot_be_quantized_is_refused_by_name():
    with pytest.raises(
        UserError, match=r"int4_128 needs .* multiple of 128, but that of layers.1.self_attn.q_proj is 96"
    ):
        model_in(Precision("int4_128"), dim=96)
    shape = replace(SHAPE, precision=Precision("int8"), reduction_chunks=2)
    two = {"tensor": 2, "pipeline": 1}
    refuse_impossible(shape, two, ParallelConfig(tensor=2))
    refuse_impossible(replace(shape, precision=Precision("float8")), two | {"tensor": 1}, ParallelConfig())
    with pytest.raises(UserError, match=r"float8 does not work with parallel.tensor 2.* use float8_rowwise or mxfp8"):
        refuse_impossible(replace(shape, precision=Precision("float8")), two, ParallelConfig(tensor=2))
    narrow = replace(shape, precision=Precision("int4"), intermediate_size=96)
    with pytest.raises(
        UserError, match=r"int4 needs .* multiple of 32 .*tensor 2 cuts the 96 .* layers.1.mlp.down_proj .* of 48;"
    ):
        refuse_impossible(narrow, two, ParallelConfig(tensor=2))
    with pytest.raises(UserError, match=r"actors.tensor 2 cuts the 96 features of layers.1.mlp.down_proj"):
        refuse_generators(narrow, 2)
    refuse_impossible(replace(narrow, precision=Precision("int4", ("*.down_proj",))), two, ParallelConfig(tensor=2))
    with pytest.raises(
        UserError, match=r'no layer matches "\*.downproj". Layers are named like layers.0.self_attn.q_proj'
    ):
        model_in(Precision("int8", keep=("*.downproj",)))
    for pattern, said in (
        ("down_proj", r'Did you mean "\*.down_proj"'),
        ("model.layers.1.*", r'Did you mean "layers.1.\*"'),
        ("*.up_proj,lm_head", "Separate patterns by spaces"),
    ):
        with pytest.raises(UserError, match=said):
            model_in(Precision("int8", keep=(pattern,)))
    with pytest.raises(UserError, match="keeps all layers of this model, so none is in int8; keep fewer"):
        model_in(Precision("int8"), num_layers=2)
    assert set(formats(model_in(Precision("int8", keep=("none",)))).values()) == {"int8"}
    with pytest.raises(UserError, match="mxfp8 has no form for the head; add lm_head to precision.keep"):
        model_in(Precision("mxfp8", keep=()))
    assert PretrainConfig().precision.linear == "auto"


def test_the_reference_of_dpo_computes_in_the_runs_precision(tmp_path):
    """One scale for all rows would make its log-probabilities depend on the micro-batch."""
    world = open_world(ParallelConfig(), "cpu")
    save_model(model_in(Precision("float8")), tmp_path)
    for chosen, expected in (("auto", "none"), ("int8", "int8")):
        config = DPOConfig(
            reference=str(tmp_path), dtype="float32", precision=PrecisionConfig(chosen), sequence_length=64
        )
        reference = reference_model(config, SimpleNamespace(world=world))
        assert reference.config.precision.linear == expected


def test_a_frozen_model_of_reinforcement_has_rows_that_do_not_depend_on_others(tmp_path):
    for trained, expected in (("float8", "none"), ("int8", "int8")):
        save_model(model_in(Precision(trained, ("lm_head",))), tmp_path / trained)
        model = frozen_model(str(tmp_path / trained), open_world(ParallelConfig(), "cpu"), "float32", ParallelConfig())
        assert model.config.precision.linear == expected
