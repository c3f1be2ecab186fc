"""Decode steps replayed as step graphs: tokens and bits of direct steps, also after changes of the weights."""

import gc
import weakref
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lockstep import Engine, EngineConfig, SamplingParams, build_model, ops
from lockstep.generate.step_graphs import StepGraphRunner
from lockstep.model import preset
from lockstep.model.config import Lora
from lockstep.model.lora import adapter_off
from lockstep.ops import native
from tests.generate.engines import SHAPE, drawn_load

pytestmark = pytest.mark.skipif(native.library() is None, reason="step graphs consist of compiled kernels")

SHAPES = {
    "qwen3": SHAPE,
    "llama3": replace(SHAPE, family="llama3", qk_norm="none", tie_embeddings=False, reduction_chunks=2),
    "windows, biases, wide heads": replace(SHAPE, windows=(8, 0), qkv_bias=True, output_bias=True, head_dim=24),
    "adapter": replace(SHAPE, lora=Lora(4, 8.0, ("layers.0.self_attn.k_proj", "layers.1.mlp.up_proj"))),
    **{
        family: replace(preset(f"{family}:micro", 60), num_layers=2, max_positions=600)
        for family in ("qwen3_moe", "gpt_oss", "deepseek_v3")
    },
}
ONE = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)


def _engines(model, **changes):
    """One that repeats every step that can be, and one that repeats none."""
    engines = [Engine(model, EngineConfig(**changes)) for _ in range(2)]
    for engine, steps in zip(engines, (1, 10**9)):
        assert isinstance(engine.runner, StepGraphRunner)
        engine.runner.steps_before_recording = steps
    return engines


def _sampled(engine, prompts=([1, 2, 3],), params=ONE):
    return engine.generate(list(prompts), params)


DTYPES = {"qwen3": "float32", "llama3": "bfloat16", "adapter": "float32", "qwen3_moe": "bfloat16"}
SLOW = {"windows, biases, wide heads": "bfloat16", "gpt_oss": "float32", "deepseek_v3": "bfloat16"}


@pytest.mark.parametrize(
    ("shape", "dtype"), [*DTYPES.items(), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW.items())]
)
@settings(max_examples=2)
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
    prompts, params = drawn_load(seed, 4, 60, longest=40, most_tokens=20, routes=["", "digest", "whole"])
    for version in range(2):
        repeated, direct = (engine.generate(prompts, params) for engine in engines)
        assert repeated == direct
        assert engines[0].runner.recorded and not engines[1].runner.recorded
        _in_place(model)
        for engine in engines:
            engine.weights_changed(version + 1)


def _replaced(model, values_of):
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(values_of(weight)))


def _moved(model):
    """Other values in other memory, as the weights of a module that was moved have."""
    _replaced(model, lambda weight: weight.detach() * 1.5)


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


def _renewed(model):
    """Other parameters over the same memory, whose version counters are not those that a recorded step knows."""
    _replaced(model, lambda weight: weight.data)


# An engine must be told of all other changes.
@pytest.mark.parametrize(
    "changes",
    [
        [(_moved, True)] * 2,
        [(_swapped, True)] * 2,
        [(_in_place, False), (_in_place, True)],
        [(_unseen, True)] * 2,
        [(_renewed, True), (_in_place, False)],
    ],
)
def test_steps_after_a_change_of_the_weights_are_of_the_new_ones(changes):
    """Between two steps of a request, whose cached keys stay if the engine is not told of the change."""
    results = []
    for place in range(2):
        model = build_model(SHAPE, "float32", seed=1)
        engine = _engines(model, draft="none")[place]
        samples = engine.samples(engine.add([1, 2, 3], SamplingParams(max_tokens=20, seed=3, n=2)))
        for step in range(16):
            engine.step()
            if step in (6, 11):
                change, told = changes[step == 11]
                change(model)
                if told:
                    engine.weights_changed(step)
        results.append([(s.tokens, s.logprobs) for s in samples])
    assert results[0] == results[1]


def test_modules_that_are_replaced_hooks_and_other_forwards_are_seen():
    results = []
    for place in range(2):
        model, calls = build_model(SHAPE, "float32", seed=1), []
        engine = _engines(model, draft="none")[place]
        results.append([_sampled(engine)])
        model.layers[1] = build_model(SHAPE, "float32", seed=2).layers[1]
        results[-1].append(_sampled(engine))
        hook = model.layers[0].register_forward_hook(lambda *_, calls=calls: calls.append(1))
        results[-1] += [_sampled(engine), len(calls)]
        hook.remove()
        forward = model.layers[1].forward
        model.layers[1].forward = lambda *given, forward=forward: forward(*given) * 2
        engine.weights_changed(1)
        results[-1].append(_sampled(engine))
    assert results[0] == results[1]
    first, replaced, hooked, calls, other = results[0]
    assert first != replaced == hooked != other and calls == 12


def test_inference_mode_leaves_an_engine_as_it_is():
    repeated, direct = _engines(build_model(SHAPE, "float32", seed=1), draft="none")
    with torch.inference_mode():  # the model's rotary tables are made here, as tensors without a version counter
        expected = _sampled(direct)
        assert _sampled(repeated) == expected and not repeated.runner.recorded
    assert _sampled(repeated) == expected and repeated.runner.recorded
    with torch.inference_mode():
        assert _sampled(repeated) == expected


def test_an_adapter_that_is_off_or_scaled_anew_is_not_that_of_recorded_steps():
    model = build_model(SHAPES["adapter"], "float32", seed=1)
    with torch.no_grad():
        for layer in (model.layers[0].self_attn.k_proj, model.layers[1].mlp.up_proj):
            layer.lora_B.weight.fill_(0.3)
    engines = _engines(model, draft="none")
    sampled = []
    for change in (None, "off", None, "scaled"):
        if change == "scaled":
            model.layers[1].mlp.up_proj.scaling *= -40.0
            for engine in engines:
                engine.weights_changed(1)
        with adapter_off(model) if change == "off" else nullcontext():
            repeated, direct = (_sampled(engine) for engine in engines)
        assert repeated == direct
        sampled.append(direct)
    assert sampled[0] == sampled[2] and sampled[1] != sampled[0] != sampled[3]


@pytest.mark.parametrize("form", ["", "digest"])
def test_routes_of_repeated_steps_are_recorded_and_settings_of_a_mixture_that_change_are_seen(form):
    model, params = build_model(SHAPES["qwen3_moe"], "float32", seed=1), replace(ONE, max_tokens=9, routes=form)
    engines, found = _engines(model, draft="none"), []
    for scale in (1.0, 3.0):
        for module in model.modules():
            if hasattr(module, "routing"):
                module.routing = replace(module.routing, scale=scale)
        for engine in engines:
            engine.weights_changed(1)
            with ops.recorded_routes() as recorded:  # which gets those that no request asks for
                sampled = _sampled(engine, [[1, 2, 3]], params)
            found.append((sampled, [each.tolist() for each in recorded]))
    assert found[0] == found[1] and found[2] == found[3] and found[0][0] != found[2][0]
    assert [len(routes) for _, routes in found] == [0 if form else 9 * 2] * 4


def test_packed_weights_are_freed_with_the_weights_and_nothing_is_sampled_until_there_are_others():
    model = build_model(SHAPE, "float32", seed=1)
    engine = _engines(model, draft="none")[0]
    before = _sampled(engine, [[5]], ONE)
    packed = [weakref.ref(panels) for step in engine.runner._steps.values() for *_, panels in step._graph.panels]

    def alive():
        gc.collect()
        return sum(panels() is not None for panels in packed)

    assert alive() == 15
    engine.release_weights()
    assert alive() == 0
    with pytest.raises(RuntimeError, match="the engine's weights were released; call weights_changed"):
        engine.generate([[5]], ONE)
    engine.weights_changed(1)
    assert _sampled(engine, [[5]], ONE) == before


def test_steps_of_long_sequences_find_their_positions():
    """The rotary tables, which a recorded step reads where they were, are replaced by larger ones meanwhile."""
    model = build_model(SHAPE, "float32", seed=1)
    repeated, direct = _engines(model, draft="none")
    params = replace(ONE, max_tokens=40)
    stream, tokens = repeated.stream([5] * 240, params), []
    for event in stream:
        tokens.append(event.token_id)
        if len(tokens) == 5:
            model.rotary.reserve(600, model.device)
    assert tokens == direct.generate([[5] * 240], params)[0][0].token_ids and repeated.runner.recorded == [1]


def test_another_arithmetic_is_not_that_of_recorded_steps():
    """A run sets its arithmetic once its model is there."""
    before = native.arithmetic()
    if before == "portable":
        pytest.skip("this processor has no other arithmetic")
    engines = _engines(build_model(SHAPE, "bfloat16", seed=1), draft="none")
    first = [_sampled(engine) for engine in engines]
    try:
        native.set_arithmetic("portable")
        second = [_sampled(engine) for engine in engines]
    finally:
        native.set_arithmetic(before)
    assert first[0] == first[1] != second[0] == second[1]


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
