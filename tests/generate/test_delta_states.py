"""Delta networks in the engine: the trainer's bits under any load, and states that are shared, kept and freed."""

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import Engine, EngineConfig, SamplingParams, build_model, ops, score
from lockstep.generate.drafts import Draft
from lockstep.generate.graphs import GraphRunner
from tests.generate.engines import HYBRID, Recorder, all_pages_are_free, finish

VOCAB = HYBRID.vocab_size
ROOMY = EngineConfig(max_tokens_per_step=512, max_sequences=16, cache_tokens=4096, draft="none")
AROUND = [length + near for length in (16, 64, 112, 128) for near in (-1, 0, 1)]
"""Lengths of prefixes: next to pages and boundaries."""


def _model(dtype):
    model = build_model(HYBRID, dtype, seed=2)
    with torch.no_grad():  # sharper logits than fresh weights give: draws that depend on them
        model.embed_tokens.weight.mul_(8)
    return model


model_of = cache(_model)


class Wrong(Draft):
    """Proposes what greedy requests of known texts will draw, as far as it is told, and something else after that."""

    def __init__(self, texts=(), right=0):
        self.texts, self.right = texts, right

    def propose(self, sequences, counts):
        return [self._propose(s.tokens, count) for s, count in zip(sequences, counts)]

    def _propose(self, tokens, count):
        known = next((text for text in self.texts if text[: len(tokens)] == tokens), tokens)
        known = known[len(tokens) :][: self.right]
        return (known + [(t + 1) % VOCAB for t in (tokens[-1:] * count)])[:count]


@cache
def _load(dtype, seed):
    """Prompts with common prefixes, parameters, and what is sampled one by one: the trainer's bits."""
    draw = random.Random(seed)
    common = [[draw.randrange(VOCAB) for _ in range(130)] for _ in range(2)]
    prompts = [
        draw.choice(common)[: draw.choice([0, *AROUND])] + [draw.randrange(VOCAB) for _ in range(draw.randint(1, 20))]
        for _ in range(5)
    ]
    params = [
        SamplingParams(max_tokens=draw.randint(1, 9), n=draw.choice([1, 2]), seed=draw.randrange(99), ignore_eos=True)
        for _ in prompts
    ]
    model = model_of(dtype)
    expected = [Engine(model, replace(ROOMY, prefix_cache=False)).generate([p], q)[0] for p, q in zip(prompts, params)]
    for prompt, group in zip(prompts, expected):
        scores = score(model, [prompt + completion.token_ids for completion in group])
        for completion, trainer in zip(group, scores, strict=True):
            assert torch.equal(torch.tensor(completion.logprobs), trainer[len(prompt) - 1 :])
    return prompts, params, expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@settings(max_examples=5, deadline=None)
@given(
    seed=st.integers(0, 3),
    budget=st.sampled_from([19, 70, 300]),
    sequences=st.sampled_from([2, 5, 16]),
    cache_tokens=st.sampled_from([176, 320, 4096]),
    prefix_cache=st.booleans(),
    right=st.sampled_from([None, 0, 3]),
)
def test_load_changes_no_bit_and_loses_no_state(dtype, seed, budget, sequences, cache_tokens, prefix_cache, right):
    prompts, params, expected = _load(dtype, seed)
    texts = [prompt + each.token_ids for prompt, group in zip(prompts, expected) for each in group]
    config = EngineConfig(budget, sequences, cache_tokens, prefix_cache, draft="none", draft_tokens=5)
    engine = Engine(model_of(dtype), config, draft=None if right is None else Wrong(texts, right))
    for _ in range(1 + prefix_cache):
        assert engine.generate(prompts, params) == expected
        assert all_pages_are_free(engine)
    assert prefix_cache or engine.scheduler.states.allocator._content_of == {}
