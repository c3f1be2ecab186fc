"""Decode steps replayed as step graphs: tokens and bits of direct steps, also after changes of the weights."""

import gc
import random
import weakref
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lockstep import Engine, EngineConfig, SamplingParams, build_model, ops
from lockstep.config import CompileConfig
from lockstep.generate import step_graphs
from lockstep.generate.drafts.step_times import RECORDING_COST, StepTimes
from lockstep.generate.runner import Runner
from lockstep.generate.step_graphs import StepGraphRunner
from lockstep.model import ModelConfig, preset
from lockstep.model.config import Lora
from lockstep.model.decoder import Block
from lockstep.model.lora import adapter_off
from lockstep.ops import native
from lockstep.parallel.compile import CompiledHalves

pytestmark = pytest.mark.skipif(native.library() is None, reason="step graphs consist of compiled kernels")

SHAPE = ModelConfig(
    family="qwen3", vocab_size=60, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=48,
    qk_norm=True, max_positions=600,
)  # fmt: skip
SHAPES = {
    "qwen3": SHAPE,
    "llama3": replace(SHAPE, family="llama3", qk_norm=False, tie_embeddings=False, reduction_chunks=2),
    "windows, biases, wide heads": replace(SHAPE, windows=(8, 0), attention_bias=True, head_dim=24),
    "adapter": replace(SHAPE, lora=Lora(4, 8.0, ("layers.0.self_attn.k_proj", "layers.1.mlp.up_proj"))),
    **{
        family: replace(preset(f"{family}:micro", 60), num_layers=2, max_positions=600)
        for family in ("qwen3_moe", "gpt_oss", "deepseek_v3")
    },
}


def _engines(model, **changes):
    """One that repeats steps, and one that does not."""
    engines = [Engine(model, EngineConfig(**changes)) for _ in range(2)]
    assert isinstance(engines[0]._runner, StepGraphRunner)
    often = step_graphs.SEEN_BEFORE_RECORDING  # so that every step is recorded
    engines[0]._runner._times_seen.update(dict.fromkeys(range(300), often))
    engines[1]._runner = Runner(model, engines[1].cache)
    return engines


def _sampled(engine, prompts, params):
    return [
        [(c.token_ids, c.logprobs, c.truncated_logprobs, c.routes) for c in g] for g in engine.generate(prompts, params)
    ]


def _load(seed):
    draw = random.Random(seed)
    prompts = [[draw.randrange(60)] * draw.randint(1, 40) for _ in range(6)]
    params = [
        SamplingParams(
            max_tokens=draw.randint(1, 24),
            n=draw.choice([1, 1, 3]),
            temperature=draw.choice([0.0, 0.7, 1.0]),
            top_k=draw.choice([0, 0, 0, 5]),
            top_logprobs=draw.choice([0, 0, 2]),
            seed=draw.randrange(100),
            routes=draw.choice(["", "digest", "whole"]),
        )
        for _ in prompts
    ]
    return prompts, params


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param(shape, dtype, marks=pytest.mark.slow if dtype == "float32" and shape != "qwen3" else ())
        for shape in SHAPES
        for dtype in ("float32", "bfloat16")
    ],
)
@settings(max_examples=4, deadline=None)
@given(
    seed=st.integers(0, 1000),
    budget=st.sampled_from([7, 30, 200]),
    sequences=st.sampled_from([1, 3, 16]),
    cache_tokens=st.sampled_from([80, 2048]),
    draft=st.sampled_from(["none", "ngram"]),
)
def test_repeated_steps_give_the_same_bits_as_direct_ones(shape, dtype, seed, budget, sequences, cache_tokens, draft):
    model = build_model(SHAPES[shape], dtype, seed=1)
    engines = _engines(
        model, max_tokens_per_step=budget, max_sequences=sequences, cache_tokens=cache_tokens, draft=draft
    )
    for version in range(2):
        repeated, direct = (_sampled(engine, *_load(seed)) for engine in engines)
        assert repeated == direct
        assert engines[0]._runner._steps and engines[0]._runner._most_rows > 0
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.5)
        for engine in engines:
            engine.weights_changed(version + 1)


def _moved(model):
    """Other values in other memory, as the weights of a module that was moved have."""
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if weight is not None:
                module._parameters[name] = nn.Parameter(weight.detach() * 1.5)


def _swapped(model):
    for weight in model.parameters():
        weight.data = weight.detach() * 1.5


def _in_place(model):
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)


def _unseen(model):
    """As a collective or a fused optimizer writes: the version counter does not change."""
    for weight in model.parameters():
        weight.data.mul_(1.5)


# An engine must be told of all other changes.
@pytest.mark.parametrize(
    ("change", "told"), [(_moved, True), (_swapped, True), (_in_place, True), (_unseen, True), (_in_place, False)]
)
def test_steps_after_a_change_of_the_weights_are_of_the_new_ones(change, told):
    """Between two steps of a request, whose cached keys stay if the engine is not told of the change."""
    results = []
    for place in range(2):
        model = build_model(SHAPE, "float32", seed=1)
        engine = _engines(model, draft="none")[place]
        request = engine.add([1, 2, 3], SamplingParams(max_tokens=30, seed=3, n=2))
        samples = engine.samples(request)
        for step in range(20):
            engine.step()
            if step in (8, 14):
                change(model)
                if told:
                    engine.weights_changed(step)
        results.append([(s.tokens, s.logprobs) for s in samples])
    assert results[0] == results[1]


def test_a_parameter_over_the_memory_of_another_is_another(monkeypatch):
    """Its version counter is not that of the one that a tape knows."""
    results = []
    for place in range(2):
        model = build_model(SHAPE, "float32", seed=1)
        engine = _engines(model, draft="none")[place]
        params = SamplingParams(max_tokens=8, seed=1)
        results.append([_sampled(engine, [[1, 2, 3]], params)])
        for module in model.modules():
            for name, weight in list(module._parameters.items()):
                if weight is not None:
                    module._parameters[name] = nn.Parameter(weight.data)
        engine.weights_changed(1)
        engine.add([1, 2, 3], replace(params, max_tokens=30))
        for step in range(20):
            if step == 10:
                _in_place(model)
            results[-1] += [(event.token_id, event.logprob) for event in engine.step()]
    assert results[0] == results[1]


def test_modules_that_are_replaced_and_hooks_are_seen():
    results = []
    for place in range(2):
        model = build_model(SHAPE, "float32", seed=1)
        engine = _engines(model, draft="none")[place]
        params, calls = SamplingParams(max_tokens=8, seed=1), []
        results.append([_sampled(engine, [[1, 2, 3]], params)])
        model.layers[1] = build_model(SHAPE, "float32", seed=2).layers[1]
        results[-1].append(_sampled(engine, [[1, 2, 3]], params))
        model.layers[0].register_forward_hook(lambda *_: calls.append(1))  # noqa: B023
        results[-1] += [_sampled(engine, [[1, 2, 3]], params), len(calls)]
    assert results[0] == results[1] and results[0][0] != results[0][1] and results[0][-1] == 8


@pytest.mark.parametrize("budget", [None, 0])
def test_another_forward_is_seen_also_where_no_weight_is_packed(budget):
    results = []
    for place in range(2):
        model = build_model(SHAPE, "float32", seed=1)
        engine = _engines(model, draft="none")[place]
        engine._weights._budget = budget
        params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
        results.append([_sampled(engine, [[1, 2, 3]], params)])
        forward = model.layers[1].forward
        model.layers[1].forward = lambda *given: forward(*given) * 2  # noqa: B023
        engine.weights_changed(1)
        results[-1].append(_sampled(engine, [[1, 2, 3]], params))
    assert results[0] == results[1] and results[0][0] != results[0][1]


def test_inference_mode_leaves_an_engine_as_it_is():
    repeated, direct = _engines(build_model(SHAPE, "float32", seed=1), draft="none")
    params = SamplingParams(max_tokens=12, seed=1)
    with torch.inference_mode():  # the model's rotary tables are made here, as tensors without a version counter
        expected = _sampled(direct, [[1, 2, 3]], params)
        assert _sampled(repeated, [[1, 2, 3]], params) == expected and not repeated._runner._steps
    assert _sampled(repeated, [[1, 2, 3]], params) == expected and repeated._runner._steps
    with torch.inference_mode():
        assert _sampled(repeated, [[1, 2, 3]], params) == expected


def test_an_adapter_that_is_off_is_not_that_of_the_tapes():
    model = build_model(SHAPES["adapter"], "float32", seed=1)
    with torch.no_grad():
        for layer in (model.layers[0].self_attn.k_proj, model.layers[1].mlp.up_proj):
            layer.lora_B.weight.fill_(0.3)
    engines = _engines(model, draft="none")
    sampled = []
    for off in (False, True, False):
        with adapter_off(model) if off else nullcontext():
            repeated, direct = (
                _sampled(engine, [[1, 2, 3]], SamplingParams(max_tokens=8, seed=1)) for engine in engines
            )
        assert repeated == direct
        sampled.append(direct)
    assert sampled[0] == sampled[2] != sampled[1]


@pytest.mark.parametrize("shape", ["adapter", "qwen3_moe"])
def test_settings_that_change_with_the_weights_are_those_of_later_steps(shape):
    model = build_model(SHAPES[shape], "float32", seed=1)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight)
    engines = _engines(model, cache_tokens=512)
    before = [_sampled(engine, *_load(4)) for engine in engines]
    for module in model.modules():
        if hasattr(module, "routing"):
            module.routing = replace(module.routing, scale=3.0)
        elif getattr(module, "lora_A", None) is not None:
            module.scaling *= -40.0
    for engine in engines:
        engine.weights_changed(1)
    repeated, direct = (_sampled(engine, *_load(4)) for engine in engines)
    assert repeated == direct != before[0] == before[1]


@pytest.mark.parametrize("form", ["", "digest"])
def test_whoever_records_routes_gets_those_of_repeated_steps_that_no_request_asks_for(form):
    model = build_model(SHAPES["qwen3_moe"], "float32", seed=1)
    found = []
    for engine in _engines(model, draft="none"):
        with ops.recorded_routes() as recorded:
            _sampled(engine, [[1, 2, 3]], SamplingParams(max_tokens=9, seed=1, ignore_eos=True, routes=form))
        found.append([each.tolist() for each in recorded])
    assert found[0] == found[1] and len(found[0]) == (0 if form else 9 * 2)


def test_packed_weights_are_freed_with_the_weights_and_where_they_are_packed_anew():
    model = build_model(SHAPE, "float32", seed=1)
    engine = _engines(model, draft="none")[0]

    def packed():
        return [weakref.ref(panels) for step in engine._runner._steps.values() for _, panels in step._graph.panels]

    def alive(panels):
        gc.collect()
        return sum(panel() is not None for panel in panels)

    for count in (1, 2, 3):
        _sampled(engine, [[5]] * count, SamplingParams(max_tokens=3, seed=1))
    first = packed()
    assert alive(first) == 3 * 15
    _swapped(model)
    engine.weights_changed(1)
    _sampled(engine, [[5]], SamplingParams(max_tokens=3, seed=1))
    _sampled(engine, [[5]], SamplingParams(max_tokens=3, seed=1))
    second = packed()
    assert alive(first) == 0 and alive(second) == 15
    engine.release_weights()
    assert alive(second) == 0


def test_steps_of_long_sequences_find_their_positions():
    """The rotary tables, which a tape reads where they were when it was recorded, are replaced by larger ones."""
    repeated, direct = _engines(build_model(SHAPE, "float32", seed=1), draft="none")
    params = SamplingParams(max_tokens=300, seed=1)
    assert _sampled(repeated, [[5] * 240], params) == _sampled(direct, [[5] * 240], params)
    assert len(repeated._runner._steps) == 1


def test_another_thread_may_make_larger_rotary_tables_meanwhile(monkeypatch):
    model = build_model(SHAPE, "float32", seed=1)
    repeated, direct = _engines(model, draft="none")

    class Disturbed(ops.StepGraph):
        def __init__(self, *given):
            super().__init__(*given)
            model.rotary.reserve(600, model.device)

    monkeypatch.setattr(ops, "StepGraph", Disturbed)
    params = SamplingParams(max_tokens=40, seed=1)
    assert _sampled(repeated, [[5] * 240], params) == _sampled(direct, [[5] * 240], params)


def test_another_arithmetic_is_not_that_of_the_tapes():
    """A run sets its arithmetic once its model is there."""
    if native.arithmetic() == "portable":
        pytest.skip("this processor has no other arithmetic")
    before = native.arithmetic()
    engines = _engines(build_model(SHAPE, "bfloat16", seed=1), draft="none")
    params = SamplingParams(max_tokens=8, seed=1)
    first = [_sampled(engine, [[1, 2, 3]], params) for engine in engines]
    try:
        native.set_arithmetic("portable")
        second = [_sampled(engine, [[1, 2, 3]], params) for engine in engines]
    finally:
        native.set_arithmetic(before)
    assert first[0] == first[1] and second[0] == second[1] and first != second


def test_a_number_of_rows_is_recorded_when_it_has_come_up_often(monkeypatch):
    monkeypatch.setattr(step_graphs, "SEEN_BEFORE_RECORDING", 3)
    engine = Engine(build_model(SHAPE, "float32", seed=1), EngineConfig(draft="none"))
    kept = []
    for count, tokens in [(1, 2), (1, 1), (2, 2), (3, 4), (2, 1)]:
        _sampled(engine, [[i] for i in range(count)], SamplingParams(max_tokens=tokens, seed=1))
        kept.append([*engine._runner._steps])
    assert kept == [[], [1], [1], [1, 3], [1, 3, 2]]


def test_the_first_step_is_recorded_soon():
    engine = Engine(build_model(SHAPE, "float32", seed=1), EngineConfig(draft="none"))
    _sampled(engine, [[1], [2]], SamplingParams(max_tokens=4, seed=1))
    assert [*engine._runner._steps] == [2]


def test_drafts_fill_few_numbers_of_rows(monkeypatch):
    """Numbers that come up often enough to be recorded."""
    monkeypatch.setattr(step_graphs, "DRAFT_ROWS", 5)
    engines = _engines(build_model(SHAPE, "float32", seed=1))
    runner = engines[0]._runner
    for engine in engines:
        _always_draft(monkeypatch, engine)
    prompts, params = [[5, 6] * 9, [7, 8] * 9, [9] * 20], SamplingParams(max_tokens=20, temperature=0.0)
    drafted, decode = set(), runner.decode

    def noting(batch):
        if len(batch.tokens) > len(batch.block_table) and (batch.positions >= 20).all():  # the prompts are computed
            drafted.add(len(batch.tokens))
        return decode(batch)

    monkeypatch.setattr(runner, "decode", noting)
    repeated, direct = (_sampled(engine, prompts, params) for engine in engines)
    assert repeated == direct
    assert drafted and all(map(runner.fits, drafted)), drafted
    assert {1, 2, 3, 4, 5, 10} >= runner._steps.keys()
    assert [rows for rows in (3, 5, 6, 10, 11, 128, 129) if runner.fits(rows)] == [3, 5, 10, 129]


def _always_draft(monkeypatch, engine):
    """By the clock, it may choose none."""
    lengths = engine._speculation.lengths
    monkeypatch.setattr(lengths, "backs_off", lambda count: False)
    monkeypatch.setattr(lengths, "choose", lambda _, limits, *rest: [min(3, limit) for limit in limits])


def test_drafts_of_long_sequences_are_attended_to_together(monkeypatch):
    monkeypatch.setattr(step_graphs, "SHARED_CONTEXT", 60)
    engines, seen = _engines(build_model(SHAPE, "float32", seed=1)), set()
    for engine in engines:
        _always_draft(monkeypatch, engine)
    runner = engines[0]._runner
    decode = runner.decode

    def noting(batch):
        decoded = decode(batch)
        seen.add((len(batch.tokens) > 1, int(batch.positions.max()) >= 60, decoded is not None))
        return decoded

    monkeypatch.setattr(runner, "decode", noting)
    repeated, direct = (
        _sampled(engine, [[5, 6] * 20], SamplingParams(max_tokens=60, temperature=0.0)) for engine in engines
    )
    assert repeated == direct
    prompt, short, long = (True, False, False), (True, False, True), (True, True, False)
    assert {prompt, short, long} <= seen and (True, True, True) not in seen


def test_a_step_is_timed_as_it_will_be_once_it_is_recorded(monkeypatch):
    """Else more rows would look slow, and be tried no more."""
    monkeypatch.setattr(step_graphs, "SEEN_BEFORE_RECORDING", 3)
    engine, paces = Engine(build_model(SHAPE, "float32", seed=1), EngineConfig()), []
    timed = engine._speculation.timed
    monkeypatch.setattr(
        engine._speculation,
        "timed",
        lambda chunks, seconds, pace: (paces.append(pace), timed(chunks, seconds, pace))[1],
    )
    engine.add([1, 2, 3], SamplingParams(max_tokens=6, seed=1))
    for _ in range(6):
        engine.step()
    assert paces[1:] == ["unrecorded", "unrecorded", "recording", "steady", "steady"], "after the prompt"
    times = StepTimes()
    for rows, seconds, pace in [(1, 3.0, "unrecorded"), (1, 2.5, "unrecorded"), (1, 9.0, "recording")]:
        times.record(rows, seconds, pace)
        assert not times.knows(1), "what is gained is not known"
    times.record(1, 1.25)
    times.record(2, 3.5, "unrecorded")
    assert times.of(np.array([1, 2])).tolist() == [1.25, 2.25 + RECORDING_COST * 1.25]
    times.record(1, 1.0)
    times.record(2, 4.0, "unrecorded")
    assert times.of(np.array([1, 2])).tolist() == [1.0, 2.0 + RECORDING_COST * 1.5], "the step of a row was disturbed"
    times.record(2, 8.0, "recording")
    times.record(2, 1.75)
    times.record(3, 4.0, "unrecorded")
    assert times.of(np.array([1, 2, 3])).tolist() == [1.0, 1.75, 2.25 + RECORDING_COST * 1.75]


def test_a_model_that_is_not_finite_ends_as_it_does_without():
    model = build_model(SHAPE, "float32", seed=1)
    engine = _engines(model)[0]
    events = []
    engine.add([1, 2, 3], SamplingParams(max_tokens=30, seed=3))
    for step in range(6):
        if step == 4:
            with torch.no_grad():
                model.norm.weight.fill_(float("nan"))
        events += engine.step()
    assert [event.finish_reason for event in events] == [None] * 4 + ["error"]


def test_a_compiled_model_runs_without():
    compiled = build_model(SHAPE, "float32")
    compiled.halves = CompiledHalves(Block, CompileConfig("inductor"))
    assert type(Engine(compiled, EngineConfig(cache_tokens=256))._runner) is Runner


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", ["qwen3", "llama3"])
def test_a_step_of_a_dense_model_is_one_call(dtype, shape):
    repeated, _ = _engines(build_model(SHAPES[shape], dtype, seed=2))
    repeated.generate([[1, 2, 3]], SamplingParams(max_tokens=3, n=3, ignore_eos=True))
    (step,) = repeated._runner._steps.values()
    assert len(step._graph._calls) > 30 and len(step._graph._merged) == 1
