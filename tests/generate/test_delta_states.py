"""Delta networks in the engine: the trainer's bits under any load, and states that are shared, kept and freed."""

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import Engine, EngineConfig, SamplingParams, build_model, ops, score
from lockstep.generate.drafts import Draft, ModelDraft
from lockstep.generate.graphs import GraphRunner
from lockstep.generate.states import States
from lockstep.ops import native
from lockstep.precision import Precision
from lockstep.rl.scoring.explain import first_difference
from tests.generate.engines import HYBRID, SHAPE, Recorder, all_pages_are_free, finish

VOCAB = HYBRID.vocab_size
ROOMY = EngineConfig(max_tokens_per_step=512, max_sequences=16, cache_tokens=4096, draft="none")
AROUND = [length + near for length in (16, 64, 112, 128) for near in (-1, 0, 1)]
"""Lengths of prefixes: next to pages and boundaries."""


def _model(dtype):
    model = build_model(HYBRID, dtype, seed=2)
    with torch.no_grad():
        model.embed_tokens.weight.mul_(8)  # sharper logits than fresh weights give: draws that depend on them
        for layer in (model.layers[0], model.layers[2]):
            layer.linear_attn.A_log.copy_(torch.tensor([-6.0, -3.0]))  # states that last longer than a chunk
            layer.linear_attn.out_proj.weight.mul_(4)
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


def _checked(engine):
    """The engine, whose steps never write an entry that they read, or twice."""
    prepare = engine._arrays.prepare

    def checked(chunks):
        batch = prepare(chunks)
        _, read, written = ([entry for entry in column if entry != ops.NO_STATE] for column in batch.states.tolist())
        assert len(set(written)) == len(written) and set(written).isdisjoint(read)
        return batch

    engine._arrays.prepare = checked
    return engine


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@settings(max_examples=5)
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
    engine = _checked(Engine(model_of(dtype), config, draft=None if right is None else Wrong(texts, right)))
    for _ in range(1 + prefix_cache):
        assert engine.generate(prompts, params) == expected
        assert all_pages_are_free(engine)
    assert prefix_cache or engine.scheduler.states.allocator._content_of == {}


def test_no_sequence_gets_the_entry_that_another_one_leaves_in_the_same_step():
    engine = _checked(Engine(model_of("float32"), replace(ROOMY, prefix_cache=False)))
    engine.generate([_prompt((126, seed)) for seed in (1, 2, 3)], replace(ONE, max_tokens=4))
    assert all_pages_are_free(engine)


def _prompt(*parts):
    """(length, seed) of each part's tokens."""
    return [random.Random(1000 * seed + place).randrange(VOCAB) for length, seed in parts for place in range(length)]


ONE = SamplingParams(max_tokens=1, seed=1, ignore_eos=True)


def _asked(engine, prompt, params=ONE):
    """What an engine samples, the trainer's bits, and the prompt tokens that it did not compute."""
    before = engine.statistics.prompt_tokens_reused
    (group,) = engine.generate([prompt], params)
    for completion in group:
        (trainer,) = score(engine.model, [prompt + completion.token_ids])
        assert torch.equal(torch.tensor(completion.logprobs), trainer[len(prompt) - 1 :])
    return engine.statistics.prompt_tokens_reused - before


def test_states_are_kept_at_a_prompts_last_boundary_and_at_branches():
    engine = Engine(model_of("float32"), ROOMY)
    assert _asked(engine, _prompt((200, 1))) == 0
    assert _asked(engine, _prompt((200, 1))) == 192, "where the first one's chunk was left open"
    assert _asked(engine, _prompt((200, 1), (90, 2))) == 192
    # What begins with 150 of its tokens finds pages of 144, but no state: it computes all, and keeps one at 128.
    steps = engine.statistics.steps
    assert _asked(engine, _prompt((150, 1), (70, 3))) == 0
    assert engine.statistics.steps == steps + 2, "its chunk ended at the branch"
    assert _asked(engine, _prompt((150, 1), (70, 4))) == 128
    assert _asked(engine, _prompt((140, 1), (3, 5))) == 128
    assert _asked(engine, _prompt((127, 1), (9, 6))) == 0, "boundaries in between are not kept"
    assert _asked(engine, _prompt((128, 1), (9, 7))) == 128
    assert _asked(engine, _prompt((128, 1))) == 64, "the last token is always computed"
    assert all_pages_are_free(engine)


def test_of_a_prompt_in_pieces_the_last_boundary_is_kept():
    engine = Engine(model_of("bfloat16"), replace(ROOMY, max_tokens_per_step=50))
    assert _asked(engine, _prompt((200, 1))) == 0
    assert _asked(engine, _prompt((200, 1))) == 192
    assert _asked(engine, _prompt((180, 1), (70, 2))) == 0 and _asked(engine, _prompt((180, 1), (70, 3))) == 128


def test_prompts_that_arrive_together_compute_their_common_prefix_twice():
    """The second finds its branch; the others wait for that."""
    engine = Engine(model_of("float32"), ROOMY)
    prompts = [_prompt((100, 1), (40, 2 + place)) for place in range(5)]
    params = [replace(ONE, max_tokens=3, seed=place, n=1 + place % 2) for place in range(5)]
    expected = [
        Engine(engine.model, replace(ROOMY, prefix_cache=False)).generate([p], q)[0] for p, q in zip(prompts, params)
    ]
    assert engine.generate(prompts, params) == expected
    assert engine.statistics.prompt_tokens_computed == 2 * 140 + 3 * 76
    assert all_pages_are_free(engine)


def test_forks_share_a_state_and_copy_the_open_chunk():
    engine, prompt = Engine(model_of("bfloat16"), ROOMY), _prompt((150, 1))
    assert _asked(engine, prompt, SamplingParams(max_tokens=9, n=4, seed=3, temperature=1.0, ignore_eos=True)) == 450
    assert engine.statistics.prompt_tokens_computed == 150
    engine.add(prompt[:140], replace(ONE, max_tokens=3, n=3))
    engine.step()
    states = {each.state for each in engine.scheduler.running}
    assert len(states) == 1 and engine.scheduler.states.allocator.ref_counts[states.pop()] == 3
    finish(engine)
    assert all_pages_are_free(engine)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drafts_that_are_rejected_behind_a_boundary_leave_the_former_state(dtype):
    model, params = model_of(dtype), replace(ONE, max_tokens=16, temperature=0.0)
    prompts = [_prompt((length, 1)) for length in (58, 125)]
    expected = Engine(model, ROOMY).generate(prompts, params)
    texts = [prompt + group[0].token_ids for prompt, group in zip(prompts, expected)]
    accepted = []
    for right in (0, 1, 4, 15):
        engine = Engine(model, replace(ROOMY, draft_tokens=15), draft=Wrong(texts, right))
        assert engine.generate(prompts, params) == expected
        assert engine.statistics.tokens_guessed > engine.statistics.guesses_accepted or right == 15
        assert all_pages_are_free(engine)
        accepted.append(engine.statistics.guesses_accepted)
    assert accepted[0] == 0 < accepted[1] < accepted[2] < accepted[3]


def test_drafts_behind_a_boundary_that_known_tokens_cross_stay_in_its_chunk():
    """A step writes one state of a sequence."""
    model, prompt, params = model_of("float32"), _prompt((62, 1)), replace(ONE, max_tokens=70, temperature=0.0)
    expected = Engine(model, ROOMY).generate([prompt], params)
    engine = Engine(model, replace(ROOMY, draft_tokens=100), draft=Wrong([prompt + expected[0][0].token_ids], 100))
    assert engine.generate([prompt], params) == expected
    assert engine.statistics.guesses_accepted > 60 and all_pages_are_free(engine)


def test_a_smaller_hybrid_model_drafts_and_forgets_what_was_wrong():
    model, prompts = model_of("float32"), [_prompt((length, 1)) for length in (50, 125)]
    params = replace(ONE, max_tokens=14, temperature=0.7)
    expected = Engine(model, ROOMY).generate(prompts, params)
    config = replace(ROOMY, draft_tokens=4)
    for small, least in ((model, 20), (build_model(replace(HYBRID, num_layers=2), "float32", seed=2), 0)):
        engine = Engine(model, config, draft=ModelDraft(small, config))
        assert engine.generate(prompts, params) == expected and all_pages_are_free(engine)
        assert engine.statistics.tokens_guessed > 0 and engine.statistics.guesses_accepted >= least
    small.load_state_dict(build_model(small.config, "float32", seed=3).state_dict())
    engine.weights_changed()
    assert engine.generate(prompts, params) == expected


def test_a_draft_model_computes_the_last_token_before_a_boundary_again():
    """As it has to when a step is interrupted: it has no state for that."""
    model, prompt, config = model_of("float32"), _prompt((128, 1)), replace(ROOMY, draft_tokens=4)
    engine = Engine(model, config, draft=ModelDraft(build_model(HYBRID, "float32", seed=2), config))
    (sample,) = engine.samples(engine.add(prompt, replace(ONE, max_tokens=6)))
    hook = model.register_forward_pre_hook(_interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    hook.remove()
    finish(engine)
    assert sample.completion() == Engine(model, ROOMY).generate([prompt], replace(ONE, max_tokens=6))[0][0]


def test_new_weights_in_the_middle_of_a_text_recompute_its_states():
    """And so does a step that was interrupted."""
    model, prompt = _model("float32"), _prompt((120, 1))
    params = SamplingParams(max_tokens=12, seed=4, ignore_eos=True, n=2)
    engine = Engine(model, ROOMY)
    samples = engine.samples(engine.add(prompt, params))
    while samples[0].sampled < 5:
        engine.step()
    begun = [replace(s.completion(), token_ids=s.tokens[120:], logprobs=list(s.logprobs)) for s in samples]
    with torch.no_grad():
        model.layers[2].linear_attn.out_proj.weight.mul_(-3)
    engine.step()
    hook = model.layers[2].register_forward_pre_hook(_interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    hook.remove()
    finish(engine)
    undisturbed = Engine(model, ROOMY)
    others = undisturbed.samples(undisturbed.add(prompt, params, begun))
    finish(undisturbed)
    assert [s.completion() for s in samples] == [s.completion() for s in others]
    assert samples[0].logprobs[5:] != Engine(_model("float32"), ROOMY).generate([prompt], params)[0][0].logprobs[5:]
    assert all_pages_are_free(engine) and all_pages_are_free(undisturbed)


def _interrupted(*_):
    raise KeyboardInterrupt


@settings(max_examples=4)
@given(
    seed=st.integers(0, 1000),
    actions=st.lists(st.sampled_from(["add", "add", "step", "step", "step", "abort", "update"]), max_size=25),
)
def test_no_state_is_lost_whatever_is_cancelled_when(seed, actions):
    draw, config = random.Random(seed), EngineConfig(max_tokens_per_step=90, max_sequences=4, cache_tokens=400)
    engine = _checked(Engine(model_of("float32"), config, draft=Wrong()))
    allocator, ids = engine.scheduler.states.allocator, []
    for action in actions:
        if action == "add":
            prompt = _prompt((draw.choice(AROUND), 1), (draw.randint(1, 9), draw.randrange(99)))
            ids.append(engine.add(prompt, SamplingParams(max_tokens=draw.randint(1, 8), n=draw.choice([1, 3]))))
        elif action == "abort" and ids:
            engine.abort(draw.choice(ids))
        elif action == "update":
            engine.weights_changed(1)
        else:
            engine.step()
        assert sum(count > 0 for count in allocator.ref_counts) <= 2 * config.max_sequences
    finish(engine)
    assert all_pages_are_free(engine)


def test_kept_states_stay_within_their_part_of_the_memory_and_the_last_used_stay():
    cache, states = Engine(model_of("float32"), ROOMY).cache, HYBRID.num_delta * 4 * (2 * 16 * 16 + 3 * 64)
    for tokens, kept in ((4096, cache.nbytes // 4 // states), (64, 1)):
        engine = Engine(model_of("float32"), replace(ROOMY, cache_tokens=tokens))
        assert engine.delta_cache.entries == 2 * ROOMY.max_sequences + kept
        assert engine.delta_cache.sizes.entry_nbytes(torch.float32) == states
    assert Engine(model_of("float32"), replace(ROOMY, prefix_cache=False)).delta_cache.entries == 32
    engine = Engine(model_of("float32"), replace(ROOMY, cache_tokens=1024))
    engine.scheduler.states = States(34, kept=2)
    for seed in (1, 2, 1, 3):
        _asked(engine, _prompt((70, seed)))
    assert [_asked(engine, _prompt((70, seed), (5, 9))) for seed in (1, 3)] == [64, 64]
    assert _asked(engine, _prompt((70, 2), (5, 9))) == 0, "the least recently used had to go"


def test_a_model_without_delta_networks_has_no_states():
    engine = Engine(build_model(SHAPE, "float32", seed=1), ROOMY)
    assert engine.delta_cache is None and engine.scheduler.states.allocator.num_pages == 0


@pytest.mark.parametrize("right", [None, 2])
def test_replayed_steps_have_the_bits_of_direct_ones(right):
    prompts, params, expected = _load("float32", 0)
    texts = [prompt + each.token_ids for prompt, group in zip(prompts, expected) for each in group]
    recorder, config = Recorder(), replace(ROOMY, max_sequences=5, draft_tokens=3)
    engine = Engine(model_of("float32"), config, draft=None if right is None else Wrong(texts, right))
    config = replace(config, draft="ngram")  # graphs have room for drafts
    engine.runner = GraphRunner(engine.model, engine.cache, config, engine._weights, recorder, engine.delta_cache)
    assert engine.generate(prompts, params) == expected
    assert recorder.replayed


@pytest.mark.skipif(native.library() is None, reason="step graphs consist of compiled kernels")
def test_steps_that_are_recorded_have_the_bits_of_direct_ones():
    prompts, params, expected = _load("float32", 0)
    engine = Engine(model_of("float32"), ROOMY)
    engine.runner.steps_before_recording = 1
    assert engine.generate(prompts, params) == expected
    assert engine.runner.recorded
    assert all_pages_are_free(engine)


def test_parity_explains_it_operator_by_operator(monkeypatch):
    model, tokens = model_of("float32"), _prompt((70, 1))
    assert first_difference(model, tokens, 60) is None
    exact = ops.PagedAttention.delta

    def delta(self, layer, *arguments):
        out = exact(self, layer, *arguments)
        return out + 1 if layer == 1 and len(out) == 1 else out

    monkeypatch.setattr(ops.PagedAttention, "delta", delta)
    found = first_difference(model, tokens, 60)
    assert (found.operator, found.position) == ("layer 2, delta rule", 60)


def test_a_cache_of_integers_is_that_of_attention_alone():
    model = build_model(replace(HYBRID, precision=Precision(cache="int8")), "bfloat16", seed=2)
    engine, params = Engine(model, ROOMY), SamplingParams(max_tokens=9, n=2, seed=3, ignore_eos=True)
    assert [_asked(engine, _prompt((100, 1), (30, seed)), params) for seed in (2, 3, 4)] == [130, 130, 64 + 130]
    assert engine.delta_cache.states.dtype == torch.float32
