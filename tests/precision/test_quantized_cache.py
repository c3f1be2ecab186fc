"""A cache of 8-bit integers: the bits of a plain cache and of the trainer, whatever the load and the arithmetic."""

import json
from dataclasses import replace
from itertools import product

import pytest
import torch

from lockstep import Engine, EngineConfig, SamplingParams, build_model, load_model, ops, save_model, score
from lockstep.checkpoint import open_model
from lockstep.config import CompileConfig, PrecisionConfig, RecomputeConfig, TrainConfig
from lockstep.errors import UserError
from lockstep.generate import engine as engines
from lockstep.generate.drafts import ModelDraft
from lockstep.generate.runner import make_cache
from lockstep.model import Decoder, preset
from lockstep.parallel import apply_compile
from lockstep.parallel.recompute import apply_recompute
from lockstep.precision import Precision, read_precision
from lockstep.rl.scoring.parity_check import check_parity
from lockstep.train import Trainer, pack
from lockstep.train.objective import NextTokenLoss
from tests.generate.engines import drawn_load
from tests.ops.conftest import FORMS, forget_forms, use

INT8 = Precision(cache="int8")
VOCAB = 60
SHAPES = {
    # Keys of 40 features are padded to 48 in the pages.
    "odd head": replace(preset("qwen3:micro", VOCAB), head_dim=40, num_layers=2, max_positions=512),
    # Windows, sinks and biases.
    "gpt-oss": replace(preset("gpt_oss:micro", VOCAB), num_layers=2, max_positions=512),
    "grouped heads": replace(preset("llama3:micro", VOCAB), num_kv_heads=1, num_layers=2, max_positions=512),
}
DTYPES = ("float32", "bfloat16")


@pytest.fixture(params=FORMS)
def form(request):
    patch = pytest.MonkeyPatch()
    use(patch, request.param)
    yield request.param
    patch.undo()
    forget_forms()


def model_of(name, dtype, precision=INT8):
    return build_model(replace(SHAPES[name], precision=precision), dtype, seed=1)


def engine_of(model, format="int8", drafts=False, **changes):
    """An engine whose prompts come in pieces, with a cache of this format for the model's keys and values; its drafts
    are the model's own, and right."""

    def cache_of_format(model, num_pages):
        shape = model.config
        return ops.KVCache(shape.num_layers, num_pages, shape.num_kv_heads, shape.head_dim, model.dtype, format=format)

    settings = dict(max_tokens_per_step=48, max_sequences=8, cache_tokens=2048, draft="none") | changes
    config = EngineConfig(**settings)
    with pytest.MonkeyPatch.context() as patch:
        if format != model.config.precision.cache:
            patch.setattr(engines, "make_cache", cache_of_format)
        return Engine(model, config, draft=ModelDraft(model, config) if drafts else None)


def results(groups):
    return [[(c.token_ids, c.logprobs, c.finish_reason) for c in group] for group in groups]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("odd head", "bfloat16"),
        ("gpt-oss", "float32"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [("odd head", "float32"), ("gpt-oss", "bfloat16"), *product(["grouped heads"], DTYPES)]
        ),
    ],
)
def test_codes_give_the_bits_of_a_plain_cache_and_of_the_trainer(form, name, dtype):
    """Under a load of long prompts in pieces, shared beginnings, several samples and drafts."""
    model = model_of(name, dtype)
    count, most = (2, 4) if form == "pytorch" else (4, 20)  # the plain operators take a second per step
    prompts, params = drawn_load(3, count, VOCAB, most_tokens=most, top_logprobs=[0], temperature=[0.5, 1.0], n=[2])
    prompts[0] = (prompts[0] * 9)[:150]
    expected = None
    for format, drafts in (("int8", False), ("none", False), ("int8", form != "pytorch")):
        engine = engine_of(model, format, drafts)
        assert {pages.dtype for pages in engine.cache.tensors()} == {torch.int8 if format == "int8" else model.dtype}
        groups = engine.generate(prompts, params)
        expected = expected or results(groups)
        assert results(groups) == expected
        assert engine.statistics.prompt_tokens_reused > 0
        assert not drafts or engine.statistics.guesses_accepted > 0
    for prompt, param, group in zip(prompts, params, groups):
        all_scores = score(model, [prompt + c.token_ids for c in group], param.temperature)
        for completion, scores in zip(group, all_scores):
            assert torch.equal(scores[len(prompt) - 1 :], torch.tensor(completion.logprobs))
    plain = model_of(name, dtype, Precision())
    assert results(Engine(plain).generate(prompts, params)) != expected, "rounding does change the bits"


def test_recorded_steps_and_drafts_of_a_model_store_codes():
    """Lone prompts, long enough for steps to be recorded."""
    model = model_of("odd head", "float32")
    params = SamplingParams(max_tokens=60, temperature=0.9, seed=1, ignore_eos=True)
    plain, drafted = engine_of(model), engine_of(model, drafts=True)
    for engine in (plain, drafted):
        ((completion,),) = engine.generate([[5, 6, 7]], params)
        (scores,) = score(model, [[5, 6, 7, *completion.token_ids]], 0.9)
        assert torch.equal(scores[2:], torch.tensor(completion.logprobs))
    assert plain.runner.recorded and drafted.statistics.guesses_accepted > 0


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_training_sees_the_rounded_keys_and_values(mode):
    """The gradient of rounding is the identity's, and a recomputed layer rounds to the same bits."""
    losses = []
    for recompute in ("none", mode):
        model = model_of("odd head", "float32")
        apply_recompute(model, RecomputeConfig(recompute))
        trainer = Trainer(model, TrainConfig(learning_rate=3e-3, warmup_steps=0, schedule="constant"), 30)
        row = pack([list(range(3, 40)), list(range(25, 55))])
        losses.append([trainer.step([row], NextTokenLoss(65))["loss"] for _ in range(30)])
    assert losses[0] == losses[1] and losses[0][-1] < 0.2 * losses[0][0]
    assert check_parity(model, tokens=64)[0].tokens_different == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_trainer_and_generator_agree_when_compiled(dtype):
    model = model_of("grouped heads", dtype)
    apply_compile(model, CompileConfig(backend="inductor"), trains=True)
    assert check_parity(model, tokens=64)[0].tokens_different == 0


def test_settings_choose_the_cache_and_a_folder_remembers_it(tmp_path):
    trained = Precision("int4", keep=("lm_head",), cache="int8")
    assert PrecisionConfig().of_model(trained, compared=True) == trained
    assert PrecisionConfig(cache="none").of_model(trained, compared=True) == replace(trained, cache="none")
    assert PrecisionConfig("none", keep=()).of_model(trained, compared=True) == Precision("none", (), "int8")
    # Without a scale for all rows, what it was trained with is sampled from with the same cache.
    assert PrecisionConfig().of_model(Precision("float8", cache="int8"), compared=True) == INT8
    model = model_of("odd head", "float32")
    save_model(model, tmp_path)
    assert load_model(tmp_path).config.precision == INT8
    assert Engine(load_model(tmp_path)).cache.format == "int8"
    assert open_model(tmp_path, precision=PrecisionConfig(cache="none")).layers[0].self_attn.cache == "none"
    settings = json.loads((tmp_path / "config.json").read_text())
    del settings["precision"]["cache"]  # as folders have it that are older than the setting
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert load_model(tmp_path).config.precision == Precision()


def test_what_has_no_codes_is_refused_by_name():
    with pytest.raises(
        UserError, match=r"precision\.cache int8 has no form for latent attention.*use precision\.cache none"
    ):
        build_model(replace(preset("deepseek_v3:micro"), precision=INT8))
    with pytest.raises(UserError, match='precision.cache "int4" is unknown. Did you mean "int8"'):
        read_precision({"linear": "none", "keep": [], "cache": "int4"}, "config.json")
    with pytest.raises(UserError, match="and can have the key cache"):
        read_precision({"linear": "none", "keep": [], "caches": "int8"}, "config.json")
    with pytest.raises(UserError, match="precision.cache int8 has no kernels for GPUs yet"):
        make_cache(Decoder(replace(SHAPES["odd head"], precision=INT8), torch.float32, "meta"), 4)
    model = model_of("odd head", "float32")
    engine = Engine(model)
    model.set_precision(Precision())
    with pytest.raises(UserError, match=r"is torch.float32 \(precision.cache none and int8\); create a new Engine"):
        engine.weights_changed()
