"""Graphs without a GPU: the same static buffers, padding and regions, run anew instead of replayed."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import Engine, EngineConfig, SamplingParams, build_model
from lockstep.errors import UserError
from lockstep.generate.graphs import DRAFT_ROWS, GraphRunner, ladder
from lockstep.model import preset
from lockstep.model.lora import adapter_off, lora_of
from tests.generate.engines import SHAPE, Recorder, drawn_load


def _model():
    return build_model(replace(SHAPE, num_layers=3), "float32", seed=1)


MODEL = _model()


def _engine(capture, model=MODEL, **settings_of_engine) -> Engine:
    config = EngineConfig(**settings_of_engine)
    engine = Engine(model, config)
    engine.runner = GraphRunner(model, engine.cache, config, engine._weights, capture)
    return engine


@settings(max_examples=3)
@given(
    seed=st.integers(0, 1000),
    budget=st.sampled_from([7, 30, 200]),
    sequences=st.sampled_from([1, 3, 16]),
    cache_tokens=st.sampled_from([80, 2048]),
)
def test_replayed_steps_give_the_same_bits_as_direct_ones(seed, budget, sequences, cache_tokens):
    prompts, params = drawn_load(seed, 6, 60, longest=40, most_tokens=12)
    plain = EngineConfig(max_tokens_per_step=budget, max_sequences=sequences, cache_tokens=cache_tokens)
    expected = Engine(MODEL, plain).generate(prompts, params)
    recorder = Recorder()
    engine = _engine(recorder, max_tokens_per_step=budget, max_sequences=sequences, cache_tokens=cache_tokens)
    assert engine.generate(prompts, params) == expected
    assert recorder.captured <= len(ladder(DRAFT_ROWS)), "recorded once per size: by far most steps are replays"


def test_a_decode_step_is_one_replay_and_others_are_run_directly():
    recorder = Recorder()
    engine = _engine(recorder, max_sequences=16, draft="none")
    engine.add([1] * 10, SamplingParams(max_tokens=50, ignore_eos=True))
    engine.step()
    assert recorder.replayed == 0
    engine.step()
    assert recorder.replayed == 1
    engine.add([2] * 30, SamplingParams(max_tokens=50, ignore_eos=True))
    engine.step()
    assert recorder.replayed == 1


def _as_without(engine):
    """The log-probabilities of a request's tokens, which are those of an engine without graphs."""
    params = SamplingParams(max_tokens=6, seed=1, ignore_eos=True)
    completion, expected = (e.generate([[1, 2]], params)[0][0] for e in (engine, Engine(engine.model, EngineConfig())))
    assert completion.logprobs == expected.logprobs
    return completion.logprobs


def test_weights_written_in_place_are_seen_and_those_that_moved_are_recorded_again():
    model, recorder = _model(), Recorder()
    engine = _engine(recorder, model, max_sequences=2, draft="none")
    before, captured = _as_without(engine), recorder.captured
    with torch.no_grad():
        model.layers[0].mlp.gate_proj.weight.mul_(30)
    engine.weights_changed(0)
    assert _as_without(engine) != before and recorder.captured == captured
    weight, square = model.layers[0].mlp.down_proj.weight, model.layers[1].self_attn.o_proj.weight
    assert square.shape[0] != square.shape[1]
    for step, change in enumerate((lambda: setattr(weight, "data", weight.data * 30), lambda: _transpose(square)), 1):
        change()
        engine.weights_changed(step)
        _as_without(engine)
        assert recorder.captured == (1 + step) * captured


def _transpose(weight):
    """Other rows over the same memory."""
    weight.data = weight.data.view(weight.shape[1], weight.shape[0]).t()


def test_hooks_and_other_forwards_are_seen():
    model, calls = _model(), []
    engine = _engine(Recorder(), model, max_sequences=2, draft="none")
    before = _as_without(engine)
    hook = model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    engine.weights_changed(1)
    assert _as_without(engine) == before and len(calls) == 12, "six steps of either engine"
    hook.remove()
    forward = model.layers[1].forward
    model.layers[1].forward = lambda *given: forward(*given) * 2
    engine.weights_changed(2)
    assert _as_without(engine) != before
    del model.layers[1].forward
    engine.weights_changed(3)
    assert _as_without(engine) == before


def test_a_model_of_another_dtype_and_graphs_on_the_cpu_are_refused():
    model = build_model(MODEL.config, "bfloat16", seed=1)
    engine = Engine(model, EngineConfig(max_sequences=2))
    model.float()
    with pytest.raises(UserError, match='cuda_graphs is "full", but the model is on cpu'):
        Engine(MODEL, EngineConfig(cuda_graphs="full"))
    with pytest.raises(UserError, match="the model is torch.float32 now, but the engine's cache is torch.bfloat16"):
        engine.weights_changed(1)


def test_an_adapter_that_is_switched_off_is_recorded_again():
    shape = replace(preset("qwen3:micro", 60), num_layers=2)
    model = build_model(replace(shape, lora=lora_of(shape, 4, 8.0, ["*_proj"])), "float32", seed=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B.weight"):
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    engine = _engine(Recorder(), model, max_sequences=2, draft="none")
    adapted = _as_without(engine)
    with adapter_off(model):
        plain = _as_without(engine)
    assert plain != adapted == _as_without(engine)
    model.layers[0] = build_model(model.config, "float32", seed=1).layers[0]  # whose adapter is still zero
    engine.weights_changed(1)
    model.layers[0].self_attn.o_proj.lora_B.weight.data.fill_(0.3)
    adapted = _as_without(engine)
    with adapter_off(model):
        assert _as_without(engine) == plain != adapted


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_replayed_steps_of_a_mixture_give_the_same_bits_and_routes_as_direct_ones(family):
    model = build_model(replace(preset(f"{family}:micro", 60), num_layers=2), "float32", seed=1)
    prompts, params = drawn_load(7, 6, 60, longest=40, most_tokens=12, routes=["whole", "digest", ""])
    expected = Engine(model, EngineConfig(max_sequences=5)).generate(prompts, params)
    recorder = Recorder()
    groups = _engine(recorder, model, max_sequences=5, draft="none").generate(prompts, params)
    assert recorder.replayed
    assert groups == expected
    assert len({route for group in groups for completion in group for route in completion.routes}) > 1


def test_a_step_that_cannot_be_captured_is_named_when_it_runs():
    def refuse(function):
        raise RuntimeError("operation not permitted when stream is capturing")

    engine = _engine(refuse, max_sequences=16)
    engine.add([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True))
    with pytest.raises(UserError, match='cuda_graphs is "full".*a decode step of 1 row.*not permitted when stream'):
        for _ in range(2):
            engine.step()
