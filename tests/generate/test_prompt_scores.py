"""Log-probabilities of prompts: the bits of `score`, however the engine comes to compute them."""

from dataclasses import replace

import pytest
import torch

from lockstep import Engine, EngineConfig, SamplingParams, build_model, ops, score
from lockstep.errors import UserError
from lockstep.generate import draws
from lockstep.model import preset
from tests.generate.engines import all_pages_are_free, drawn_load

VOCAB = 260


def _model():
    shape = replace(preset("qwen3:micro", VOCAB), max_positions=300, num_layers=2)
    model = build_model(shape, "bfloat16", seed=3)
    with torch.no_grad():
        model.embed_tokens.weight.mul_(8)
    return model


MODEL = _model()


def _engine(**options):
    return Engine(MODEL, EngineConfig(**{"max_tokens_per_step": 24, "max_sequences": 5, "cache_tokens": 512} | options))


def _check(scores, prompt, top):
    assert scores.complete and scores.tokens == prompt
    assert torch.equal(torch.tensor(scores.logprobs), score(MODEL, [prompt])[0])
    with torch.no_grad():
        hidden = MODEL(torch.tensor(prompt), torch.arange(len(prompt)), ops.PackedAttention([len(prompt)]))
        logits = MODEL.logits(hidden)
    for place, likeliest in enumerate(scores.top_logprobs):
        assert len(likeliest) == top
        tokens = [token for token, _ in likeliest]
        for token, logprob in likeliest:
            assert logprob == float(score(MODEL, [[*prompt[: place + 1], token]])[0][-1])
        chosen = prompt[place + 1]
        assert scores.ranks[place] == int((logits[place] >= logits[place, chosen]).sum())
        if chosen in tokens:
            assert dict(likeliest)[chosen] == scores.logprobs[place]


def _run(engine, prompts, params):
    """The last event of each sample, by request."""
    requests = {engine.add(prompt, param): number for number, (prompt, param) in enumerate(zip(prompts, params))}
    found = [{} for _ in prompts]
    while engine.has_work:
        for event in engine.step():
            scores = event.prompt_scores
            # A prompt's log-probabilities come with the first token of each of its samples.
            assert scores is None or scores.complete
            found[requests[event.request_id]][event.index] = event
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"cache_tokens": 128}, {"prefix_cache": False}, {"draft": "auto"}, {"max_tokens_per_step": 7}],
    ids=str,
)
def test_they_are_the_trainers_in_any_batch(options):
    prompts, params = drawn_load(1, 9, VOCAB, most_tokens=9, prompt_logprobs=[None, 0, 2], top_logprobs=[0])
    prompts[3:6] = [prompts[3]] * 3  # of different requests, of which one is computed
    engine = _engine(**options)
    for _ in range(2):  # the second time, the cache has every prompt
        for prompt, param, events in zip(prompts, params, _run(engine, prompts, params)):
            assert len(events) == param.n
            for event in events.values():
                if param.prompt_logprobs is None:
                    assert event.prompt_scores is None
                else:
                    assert event.prompt_scores is events[0].prompt_scores
            if param.prompt_logprobs is not None:
                _check(events[0].prompt_scores, prompt, param.prompt_logprobs)
    assert all_pages_are_free(engine)
    if options.get("cache_tokens") == 128:
        assert engine.statistics.preemptions > 0


def test_logits_of_a_long_prompt_are_computed_in_slices(monkeypatch):
    monkeypatch.setattr(draws, "LOGITS_ELEMENTS", 3 * VOCAB)
    rows, own = [], type(MODEL).logits
    monkeypatch.setattr(type(MODEL), "logits", lambda self, hidden, of: rows.append(len(hidden)) or own(self, hidden))
    prompt = [(7 * i) % VOCAB for i in range(50)]
    (events,) = _run(_engine(), [prompt], [SamplingParams(max_tokens=1, prompt_logprobs=0)])
    assert max(rows) == 3
    monkeypatch.undo()
    assert torch.equal(torch.tensor(events[0].prompt_scores.logprobs), score(MODEL, [prompt])[0])


def test_a_prompt_of_one_token_has_none_and_the_samples_are_the_same_with_and_without():
    prompts, params = [[5], [6] * 30], SamplingParams(max_tokens=5, seed=1, n=2)
    expected = _engine().generate(prompts, params)
    assert _engine().generate(prompts, replace(params, prompt_logprobs=3)) == expected
    (events, _) = _run(_engine(), prompts, [replace(params, prompt_logprobs=3)] * 2)
    assert events[0].prompt_scores.logprobs == [] and events[0].prompt_scores.complete


def test_new_weights_within_a_prompt_score_all_of_it_anew():
    model = _model()
    engine = Engine(model, EngineConfig(max_tokens_per_step=10))
    prompt = list(range(40))
    engine.add(prompt, SamplingParams(max_tokens=1, prompt_logprobs=0))
    engine.step()
    with torch.no_grad():
        model.layers[0].mlp.down_proj.weight.mul_(3)
    events = []
    while engine.has_work:
        events += engine.step()
    assert torch.equal(torch.tensor(events[0].prompt_scores.logprobs), score(model, [prompt])[0])


def test_more_than_20_are_refused():
    with pytest.raises(UserError, match="prompt_logprobs is 21; it must be from 0 to 20"):
        SamplingParams(prompt_logprobs=21)
