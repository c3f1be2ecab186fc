"""An engine that goes on with what another has begun has the tokens and log-probabilities of an undisturbed one."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import Engine, EngineConfig, SamplingParams, build_model
from lockstep.data import ByteTokenizer
from lockstep.generate import Completion
from lockstep.generate.driver import DriverEngine, follow
from lockstep.model import preset
from lockstep.parallel import close_world
from tests.generate.engines import finish
from tests.generate.test_tensor_parallel import model_of
from tests.parallel.launch import launch

TOKENIZER = ByteTokenizer()
LIMIT = 40
"""Of prompt and completion."""


def _model():
    model = build_model(replace(preset("qwen3:micro", 258), max_positions=LIMIT), "bfloat16", seed=3)
    with torch.no_grad():  # sharper logits than fresh weights give: draws that depend on all before them
        model.embed_tokens.weight.mul_(8)
    return model


MODEL = _model()


def _engine():
    return Engine(MODEL, EngineConfig(max_tokens_per_step=24, max_sequences=5, cache_tokens=256), TOKENIZER)


def _prefix(whole, length):
    """The first tokens of a completion, as far as another engine has come: ended if the last is among them."""
    length = min(length, len(whole.token_ids))
    ended = whole.finish_reason if length == len(whole.token_ids) else "abort"
    return Completion(whole.token_ids[:length], whole.logprobs[:length], ended, whole.truncated_logprobs[:length])


def _go_on(engine, prompt, params, begun):
    request = engine.add(prompt, params, begun)
    samples = list(engine.samples(request))
    finish(engine)
    return [sample.completion() for sample in samples]


@pytest.mark.slow
@settings(max_examples=12)
@given(st.data())
def test_an_engine_continues_from_any_prefix_of_each_sample(data):
    prompt = data.draw(st.lists(st.integers(0, 255), min_size=1, max_size=24))
    params = SamplingParams(
        n=data.draw(st.integers(1, 4)),
        max_tokens=LIMIT - len(prompt),  # up to the last position that the model has
        seed=data.draw(st.integers(0, 2**31)),
        temperature=data.draw(st.sampled_from([0.0, 0.7, 1.0])),
        top_p=data.draw(st.sampled_from([1.0, 0.8])),
        top_k=data.draw(st.sampled_from([0, 9])),
        ignore_eos=True,
    )
    (free,) = _engine().generate([prompt], params)
    text = TOKENIZER.decode(free[0].token_ids)
    start = data.draw(st.integers(0, max(0, len(text) - 4)))
    # Strings of the text itself, so that samples stop, some at the end of what had begun, some in the middle of it.
    stops = tuple(stop for stop in (text[start : start + 3], text[-2:]) if stop) if data.draw(st.booleans()) else ()
    params = replace(params, stop=stops)
    (whole,) = _engine().generate([prompt], params)
    begun = [_prefix(completion, data.draw(st.integers(0, LIMIT))) for completion in whole]
    if all(completion.finish_reason != "abort" for completion in begun):
        begun[-1] = _prefix(whole[-1], len(whole[-1].token_ids) - 1)
    assert _go_on(_engine(), prompt, params, begun) == whole


def begun_on_ranks(ranks):
    world, model = model_of(ranks, 2, "qwen3:micro", "bfloat16", 258)
    found = None
    if world.is_main:
        engine = (DriverEngine if ranks > 1 else Engine)(model)
        params = SamplingParams(max_tokens=9, seed=1, n=3, ignore_eos=True, top_p=0.9)
        (whole,) = engine.generate([[4, 5, 6]], params)
        begun = [_prefix(completion, length) for completion, length in zip(whole, (4, 9, 0))]
        assert _go_on(engine, [4, 5, 6], params, begun) == whole
        found = whole
        if ranks > 1:
            engine.end()
    else:
        follow(Engine(model))
    close_world(world)
    return found


def test_ranks_continue_samples_that_were_begun_elsewhere():
    assert launch(2, begun_on_ranks, 2) == [launch(1, begun_on_ranks, 1)[0], None]
