"""Several adapters of one base in one engine: each row has the bits that it has with its adapter built in."""

import copy
import json
import random
from collections import defaultdict
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import Engine, EngineConfig, SamplingParams, load_model, save_model, score
from lockstep.config import PrecisionConfig, RecomputeConfig
from lockstep.errors import UserError
from lockstep.generate import draws
from lockstep.generate.drafts.model import ModelDraft
from lockstep.model import PRESETS, build_model, lora_of, preset, save_adapter
from lockstep.model.adapted_rows import AdaptedRows, adapted
from lockstep.model.adapters import build_adapter, load_adapter
from lockstep.model.decoder import Block
from lockstep.ops import PAGE
from lockstep.parallel.recompute import apply_recompute
from lockstep.precision import KEEP
from lockstep.train.packing import log_probs
from tests.generate.engines import SHAPE, all_pages_are_free, drawn_load, finish
from tests.generate.test_drafts import SPOILS, Oracle

TARGETS = {
    "all": (4, ("*_proj", "lm_head")),
    "attention": (1, ("q_proj", "v_proj")),
    "mlp": (8, ("mlp.*",)),
    "last": (3, ("layers.1.*",)),
    "head": (5, ("lm_head",)),
}
"""Rank and layers of each adapter."""
SHAPES = {
    "plain": SHAPE,
    "fused": replace(SHAPE, family="phi3", qk_norm="none", fused=("qkv_proj", "gate_up_proj"), tie_embeddings=False),
    "capped": replace(preset("gemma3:micro", SHAPE.vocab_size), logits_softcap=0.5, max_positions=600),
}
"""With a tied head but one."""


def _moved(adapter, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapter.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return adapter


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of a base and of its adapters by name, for a shape and a dtype."""

    @cache
    def written(shape, dtype):
        folder = tmp_path_factory.mktemp("adapters")
        base = build_model(SHAPES[shape], dtype, seed=2)
        save_model(base, folder / "base")
        found = {"": folder / "base"}
        for number, (name, (rank, targets)) in enumerate(TARGETS.items()):
            targets = [t for t in targets if shape != "fused" or t not in ("q_proj", "v_proj")] or ["qkv_proj"]
            adapter = _moved(build_adapter(base, lora_of(base.config, rank, 8.0, targets), number), number)
            save_adapter(adapter, folder / name, folder / "base")
            found[name] = folder / name
        return found

    return written


@pytest.fixture(scope="module")
def models(folders):
    """(base, its adapters by name, the models with each adapter built in) for a shape, a dtype and a format."""

    def in_format(model, format):
        model.set_precision(
            PrecisionConfig(linear=format, keep=("*.down_proj",) if format != "none" else KEEP).of_model(
                model.config.precision, compared=True
            )
        )
        return model

    @cache
    def opened(shape, dtype, format="none"):
        where = folders(shape, dtype)
        built = {name: in_format(load_model(folder), format) for name, folder in where.items()}
        base = in_format(load_model(where[""]), format)
        adapters = {name: load_adapter(where[name], base, where[""]) for name in TARGETS}
        return base, adapters, built

    return opened


def _engine(base, adapters, config=None, draft=None):
    engine = Engine(base, config or EngineConfig(max_sequences=8, cache_tokens=1024), draft=draft)
    for name, adapter in adapters.items():
        engine.load_adapter(name, adapter)
    return engine


def _require_bits(built, prompts, params, groups):
    """Every log-probability is that of the model with the request's adapter built in."""
    samples = defaultdict(list)
    for prompt, each, group in zip(prompts, params, groups, strict=True):
        samples[each.adapter, each.temperature] += [(prompt, completion) for completion in group]
    for (name, temperature), pairs in samples.items():
        scores = score(built[name], [prompt + completion.token_ids for prompt, completion in pairs], temperature)
        for (prompt, completion), own in zip(pairs, scores):
            assert torch.equal(own[len(prompt) - 1 :], torch.tensor(completion.logprobs)), name


@pytest.mark.parametrize(
    ("shape", "dtype", "format"),
    [
        ("plain", "float32", "none"),
        ("plain", "bfloat16", "none"),
        ("fused", "bfloat16", "none"),
        ("capped", "float32", "none"),
        ("plain", "float32", "int8"),
        ("plain", "bfloat16", "int4"),
    ],
)
@settings(max_examples=4)
@given(
    seed=st.integers(0, 10_000),
    tokens_per_step=st.sampled_from([16, 37, 256]),
    cache_tokens=st.sampled_from([15 * PAGE, 64 * PAGE]),
    draft=st.sampled_from(["none", "ngram", "model", "oracle"]),
    count=st.integers(1, 4),
    prefix_cache=st.booleans(),
    replays=st.booleans(),
)
def test_rows_have_the_bits_of_their_adapter_alone(
    models, shape, dtype, format, seed, tokens_per_step, cache_tokens, draft, count, prefix_cache, replays
):
    base, adapters, built = models(shape, dtype, format)
    names = random.Random(seed).sample(sorted(adapters), count)
    loaded = {name: adapters[name] for name in names}
    prompts, params = drawn_load(seed, 8, SHAPE.vocab_size, 12, adapter=["", *names])
    config = EngineConfig(
        max_sequences=5, cache_tokens=cache_tokens, max_tokens_per_step=tokens_per_step, prefix_cache=prefix_cache
    )
    guesses = None
    if draft == "model":
        guesses = ModelDraft(build_model(replace(SHAPE, dim=16), dtype), config)
    elif draft == "oracle":
        guesses = Oracle(_engine(base, loaded).generate(prompts, params), SPOILS["the second wrong"])
    engine = _engine(base, loaded, replace(config, draft="ngram" if draft == "ngram" else "none"), guesses)
    engine.runner.steps_before_recording = 1 if replays else 1000
    _require_bits(built, prompts, params, engine.generate(prompts, params))
    assert all_pages_are_free(engine)


@pytest.mark.parametrize("family", sorted({name for name in PRESETS if name.endswith(":micro")}))
def test_every_familys_layers_can_have_adapters_of_some_rows(family):
    shape = preset(family, 60)
    lora = lora_of(shape, 2, 8.0, ("*",))
    base, whole = build_model(shape, "float32", seed=3), build_model(replace(shape, lora=lora), "float32", seed=3)
    engine = _engine(base, {"it": _moved(build_adapter(base, lora, seed=3), 1)})
    prompts, names = [[1, 2, 3], [4, 5], [1, 2, 3]], ["it", "", ""]
    params = [SamplingParams(max_tokens=3, seed=1, adapter=name) for name in names]
    built = {"": base, "it": _moved(whole, 1)}
    _require_bits(built, prompts, params, engine.generate(prompts, params))


@pytest.mark.parametrize("shape", ["fused", "capped"])
def test_the_log_probabilities_of_prompts_are_those_of_their_adapter(models, shape, monkeypatch):
    monkeypatch.setattr(draws, "LOGITS_ELEMENTS", 5 * SHAPE.vocab_size)
    base, adapters, built = models(shape, "bfloat16")
    names = ["all", "", "head", "mlp"]
    prompts = [[(7 * place + number) % 60 for place in range(4 * number + 3)] for number in range(len(names))]
    params = [SamplingParams(max_tokens=2, seed=1, adapter=name, prompt_logprobs=2, top_logprobs=2) for name in names]
    engine = _engine(base, adapters, EngineConfig(max_sequences=5, cache_tokens=1024, max_tokens_per_step=11))
    requests = {engine.add(prompt, each): place for place, (prompt, each) in enumerate(zip(prompts, params))}
    found = {}
    while engine.has_work:
        for event in engine.step():
            place = requests[event.request_id]
            model, text = built[names[place]], found.setdefault(place, list(prompts[place]))
            if (scores := event.prompt_scores) is not None:
                assert torch.equal(torch.tensor(scores.logprobs), score(model, [prompts[place]])[0])
                for end, likeliest in enumerate(scores.top_logprobs, 1):
                    assert all(p == float(score(model, [[*text[:end], t]])[0][-1]) for t, p in likeliest)
            assert all(p == float(score(model, [[*text, t]])[0][-1]) for t, p in event.top_logprobs)
            text.append(event.token_id)
    assert len(found) == len(names)


def test_rows_of_one_training_row_have_their_own_adapters(models):
    base, adapters, built = models("capped", "bfloat16")
    names = ["all", "", "head", "mlp"]
    texts = [[(5 * place + number) % 60 for place in range(6 + number)] for number in range(len(names))]
    firsts = [sum(map(len, texts[:number])) for number in range(len(names))]
    rows = [
        AdaptedRows(adapters[name], torch.arange(first, first + len(text)))
        for name, text, first in zip(names, texts, firsts)
        if name
    ]
    with adapted(rows):
        found = score(base, texts, 0.7)
    for name, text, scores in zip(names, texts, found):
        assert torch.equal(scores, score(built[name], [text], 0.7)[0]), name


def test_rows_of_drafts_have_their_sequences_adapter(models):
    base, adapters, built = models("plain", "float32")
    prompts, names = [[number, 5, 9] for number in range(4)], ["all", "", "mlp", "all"]
    params = [SamplingParams(max_tokens=20, seed=1, adapter=name, ignore_eos=True) for name in names]
    plain = _engine(base, adapters).generate(prompts, params)
    engine = _engine(base, adapters, draft=Oracle(plain))
    assert engine.generate(prompts, params) == plain
    assert engine.statistics.guesses_accepted > 20
    engine = _engine(base, adapters, draft=ModelDraft(build_model(replace(SHAPE, dim=16), "float32"), engine.config))
    assert engine.generate(prompts, params) == plain
    assert engine.statistics.tokens_guessed > 0
    _require_bits(built, prompts, params, plain)


def test_steps_with_adapters_are_replayed_until_one_is_unloaded_or_moves(models):
    base, adapters, built = models("plain", "float32")
    adapters = copy.deepcopy({name: adapters[name] for name in ("all", "mlp")})
    engine = _engine(base, adapters)
    engine.runner.steps_before_recording = 2
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    params = [SamplingParams(max_tokens=9, seed=1, adapter=name, ignore_eos=True) for name in ("all", "", "mlp")]
    _require_bits(built, prompts, params, engine.generate(prompts, params))
    assert engine.runner.recorded == [3]
    recorded = dict(engine.runner._steps)
    with torch.no_grad():
        for parameter in adapters["mlp"].parameters():  # in place: the recorded step remains
            parameter.mul_(2)
    with adapted([AdaptedRows(adapters["mlp"])]):
        (completion,) = engine.generate(prompts, params)[2]
        (scores,) = score(base, [prompts[2] + completion.token_ids])
    assert torch.equal(scores[3:], torch.tensor(completion.logprobs))
    assert engine.runner._steps == recorded
    for parameter in adapters["mlp"].parameters():  # to other addresses
        parameter.data = parameter.data / 2
    engine.weights_changed(adapter="mlp")
    assert engine.runner.recorded == []
    _require_bits(built, prompts, params, engine.generate(prompts, params))
    assert engine.runner.recorded == [3]
    engine.unload_adapter("all")
    assert engine.runner.recorded == []


def test_equal_prompts_of_different_adapters_share_no_keys(models):
    base, adapters, built = models("plain", "float32")
    engine = _engine(base, adapters)
    prompt = list(range(3 * PAGE + 1))
    params = [SamplingParams(max_tokens=4, seed=1, n=2, adapter=name) for name in ("", *adapters) for _ in range(2)]
    for _ in range(2):
        _require_bits(built, [prompt] * len(params), params, engine.generate([prompt] * len(params), params))
    assert engine.statistics.prompt_tokens_reused > 10 * 3 * PAGE  # within an adapter, they do


@pytest.mark.parametrize("how", ["by version", "told"])
def test_a_changed_adapter_is_noticed_and_the_others_keep_their_keys(models, how):
    base, _, _ = models("plain", "bfloat16")
    lora = lora_of(SHAPE, 4, 8.0, ("*_proj",))
    adapters = {name: _moved(build_adapter(base, lora), 7) for name in ("one", "two")}
    before, after = copy.deepcopy(adapters["one"]), _moved(build_adapter(base, lora), 8)
    engine = _engine(base, adapters)
    prompt, common = list(range(2 * PAGE + 1)), SamplingParams(max_tokens=30, seed=1, ignore_eos=True)
    requests = {name: engine.add(prompt, replace(common, adapter=name)) for name in ("", *adapters)}
    samples = {name: engine.samples(request)[0] for name, request in requests.items()}
    for _ in range(4):
        engine.step()
    sampled, computed = samples["one"].sampled, engine.statistics.prompt_tokens_computed
    for old, new in zip(adapters["one"].parameters(), after.parameters()):
        with torch.no_grad():
            (old if how == "by version" else old.data).copy_(new)
    if how == "told":
        engine.weights_changed(adapter="one")
    finish(engine)
    assert engine.statistics.prompt_tokens_computed - computed < 2 * len(prompt)  # those of "one" alone
    engine.generate([prompt] * 2, [replace(common, adapter=name) for name in ("one", "")])  # none with its old keys
    for name, changed in {"": 0, "one": sampled, "two": 0}.items():
        tokens, logprobs = samples[name].tokens, torch.tensor(samples[name].logprobs)
        for adapter, part in ((before, slice(changed)), (after, slice(changed, None))):
            adapter = adapter if name == "one" else adapters.get(name)
            with adapted([AdaptedRows(adapter)] if adapter else []):
                (scores,) = score(base, [tokens])
            assert torch.equal(scores[len(prompt) - 1 :][part], logprobs[part])


def test_an_updated_adapters_cached_pages_are_not_found_again(models):
    base, adapters, _ = models("plain", "float32")
    adapter = copy.deepcopy(adapters["all"])
    engine = _engine(base, {"it": adapter, "other": adapters["mlp"]})
    prompt, names = list(range(3 * PAGE + 1)), ["it", "other", ""]
    params = [SamplingParams(max_tokens=3, seed=1, adapter=name) for name in names]
    engine.generate([prompt] * 3, params)
    with torch.no_grad():
        adapter.matrices["layers.0.self_attn.k_proj"][1].weight.mul_(2)
    reused = engine.statistics.prompt_tokens_reused
    for name, ((completion,),) in zip(names, [engine.generate([prompt], each) for each in params]):
        with adapted([AdaptedRows({"it": adapter, "other": adapters["mlp"]}[name])] if name else []):
            (scores,) = score(base, [prompt + completion.token_ids])
        assert torch.equal(scores[len(prompt) - 1 :], torch.tensor(completion.logprobs))
    assert engine.statistics.prompt_tokens_reused - reused == 2 * 3 * PAGE


def test_an_unloaded_adapters_requests_finish_and_new_ones_are_refused(models):
    base, adapters, built = models("plain", "bfloat16")
    engine = _engine(base, adapters)
    prompt, params = list(range(20)), SamplingParams(max_tokens=8, seed=1, n=2, adapter="all", ignore_eos=True)
    samples = engine.samples(engine.add(prompt, params))
    engine.step()
    engine.unload_adapter("all")
    assert list(engine.adapters) == [name for name in TARGETS if name != "all"]
    with pytest.raises(UserError, match="'all' is not loaded; there are: 'attention', 'mlp', 'last'"):
        engine.add(prompt, params)
    with pytest.raises(UserError, match="'all' is not loaded"):
        engine.unload_adapter("all")
    engine.load_adapter("all", adapters["mlp"])  # another one under its name
    finish(engine)
    _require_bits(built, [prompt], [params], [[each.completion() for each in samples]])
    _require_bits({"all": built["mlp"]}, [prompt], [params], engine.generate([prompt], params))
    assert not engine.adapters.unloaded


def test_an_adapters_packed_matrices_are_freed_with_it(models):
    base, adapters, _ = models("plain", "float32")
    engine = _engine(base, adapters)
    addresses = {parameter.data_ptr() for parameter in adapters["all"].parameters()}
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3, adapter="all"))
    assert addresses & {address for address, _ in engine._weights._panels}
    engine.unload_adapter("all")
    assert not addresses & {address for address, _ in engine._weights._panels}


def test_what_cannot_have_adapters_refuses_them_by_name(models, folders):
    base, adapters, built = models("plain", "float32")
    adapter = adapters["all"]
    engine = _engine(base, adapters)
    with pytest.raises(UserError, match="'all' has already been loaded"):
        engine.load_adapter("all", adapter)
    with pytest.raises(UserError, match="needs a name"):
        engine.load_adapter("", adapter)
    with pytest.raises(UserError, match="has an adapter built in"):
        _engine(built["mlp"], {"all": adapter})
    with pytest.raises(UserError, match="is torch.bfloat16 on cpu, but the model torch.float32"):
        engine.load_adapter("new", models("plain", "bfloat16")[1]["all"])
    with pytest.raises(UserError, match="is for another base: layers.0.self_attn.q_proj"):
        wider = build_model(replace(SHAPE, dim=64), "float32")
        engine.load_adapter("new", build_adapter(wider, lora_of(wider.config, 4, 8.0, ("*_proj",))))
    where = folders("plain", "float32")
    with pytest.raises(UserError, match="is not an adapter's folder"):
        load_adapter(where[""], base, where[""])
    with pytest.raises(UserError, match="is an adapter for other weights"):
        load_adapter(where["all"], base, folders("plain", "bfloat16")[""])
    compiled = load_model(where[""])
    compiled.halves = type("Compiled", (Block,), {})
    with pytest.raises(UserError, match=r"compile\.backend"):
        _engine(compiled, {"all": adapter})
    with adapted([AdaptedRows(adapter, torch.tensor([0, 99]))]), pytest.raises(ValueError, match="has a row outside"):
        score(base, [[1, 2, 3]])
    with adapted([AdaptedRows(adapter, torch.tensor([0, 9]))]), pytest.raises(ValueError, match="outside of the 2"):
        base.logits(torch.zeros(2, SHAPE.dim))
    with adapted([AdaptedRows(adapter)]), pytest.raises(UserError, match=r"compile\.backend"):
        score(compiled, [[1, 2, 3]])


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_gradients_reach_the_adapter_as_if_it_were_built_in(models, recompute):
    base, adapters, built = models("plain", "float32")
    base, adapter, whole = copy.deepcopy(base), copy.deepcopy(adapters["all"]), copy.deepcopy(built["all"])
    base.requires_grad_(False)
    rows = [list(range(5, 45)), list(range(20))]
    for model in (base, whole):
        apply_recompute(model, RecomputeConfig(mode=recompute))
    with adapted([AdaptedRows(adapter)]):
        loss = torch.cat(log_probs(base, rows)).sum()
    loss.backward()
    torch.cat(log_probs(whole, rows)).sum().backward()
    wanted = {name: parameter.grad for name, parameter in whole.named_parameters() if "lora_" in name}
    assert {name for name, _ in adapter.named_parameters()} == wanted.keys()
    for name, parameter in adapter.named_parameters():
        assert torch.equal(parameter.grad, wanted[name]), name
    assert all(parameter.grad is None for parameter in base.parameters())


def test_a_fresh_adapter_has_the_values_of_one_built_in_and_is_written_as_it(tmp_path):
    base = build_model(SHAPE, "bfloat16", seed=2)
    lora = lora_of(SHAPE, 4, 8.0, ("mlp.*", "q_proj"))
    adapter, whole = build_adapter(base, lora, seed=5), build_model(replace(SHAPE, lora=lora), "bfloat16", seed=5)
    wanted = [(name, parameter) for name, parameter in whole.named_parameters() if "lora_" in name]
    assert [name for name, _ in adapter.named_parameters()] == [name for name, _ in wanted]
    assert all(torch.equal(one, other) for one, (_, other) in zip(adapter.parameters(), wanted))
    save_model(base, tmp_path / "base")
    _moved(adapter, 1)
    save_adapter(adapter, tmp_path / "one", tmp_path / "base")
    description = tmp_path / "one" / "adapter_config.json"
    description.write_text(json.dumps(json.loads(description.read_text()) | {"base_model_name_or_path": "gone/away"}))
    read = load_adapter(tmp_path / "one", base, tmp_path / "base")
    assert all(torch.equal(one, other) for one, other in zip(adapter.parameters(), read.parameters()))
    (scores,) = score(load_model(tmp_path / "one"), [[1, 2, 3, 4]])
    with adapted([AdaptedRows(read)]):
        assert torch.equal(score(base, [[1, 2, 3, 4]])[0], scores)
