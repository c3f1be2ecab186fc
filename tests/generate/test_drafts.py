"""Speculation: the very tokens and log-probabilities of decoding one by one, whatever is drafted."""

import random
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import Engine, EngineConfig, SamplingParams, build_model, save_model
from lockstep.config import CompileConfig
from lockstep.data import ByteTokenizer
from lockstep.errors import UserError
from lockstep.generate.drafts import Draft, FirstOf, HistoryDraft, ModelDraft, NGramDraft, make_draft
from lockstep.generate.drafts.history import PROMPT
from lockstep.generate.drafts.lengths import RETRY_STEPS, DraftLengths
from lockstep.generate.sequence import Sequence
from lockstep.model import preset
from lockstep.model.lora import lora_of
from lockstep.parallel import apply_compile
from tests.generate.engines import SHAPE, all_pages_are_free, drawn_load, finish

VOCAB = 60
CONFIG = replace(SHAPE, dim=64, head_dim=32, intermediate_size=64, max_positions=512, eos_token_ids=(7,))
ROOMY = EngineConfig(max_tokens_per_step=512, max_sequences=32, cache_tokens=8192, draft="none")


@cache
def model_of(family: str, dtype: str = "float32"):
    """A small model of a family, one with an adapter, or a compiled one."""
    config = CONFIG
    if family in ("gpt_oss", "deepseek_v3", "qwen3_moe"):
        # The first layer of gpt-oss's has a window, that of DeepSeek-V3's a dense feed-forward.
        config = replace(preset(f"{family}:micro", VOCAB), num_layers=2, eos_token_ids=(7,))
    if family == "adapter":
        config = replace(config, lora=lora_of(config, 4, 8.0, ["*_proj"]))
    model = build_model(config, dtype, seed=2)
    with torch.no_grad():  # sharper logits than fresh weights give: texts that repeat themselves at times
        model.embed_tokens.weight.mul_(4)
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B.weight"):
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(3))
    if family == "compiled":
        apply_compile(model, CompileConfig(backend="inductor"), trains=False)
    return model


class Oracle(Draft):
    """Knows what the engine's first requests will draw, and spoils it as told."""

    def __init__(self, groups, spoil=lambda right, count: right):
        self.groups, self.spoil = groups, spoil

    def propose(self, sequences, counts):
        return [self._propose(s, count) for s, count in zip(sequences, counts)]

    def _propose(self, sequence, count):
        known = [group[sequence.index].token_ids for group in self.groups[sequence.request_id :][:1] if group]
        return self.spoil(known[0][sequence.sampled :][:count], count) if known else []


SPOILS = {
    "all right": lambda right, count: right,
    "all wrong": lambda right, count: [(t + 1) % VOCAB for t in right],
    "the second wrong": lambda right, count: [*right[:1], *((t + 1) % VOCAB for t in right[1:2]), *right[2:]],
    "end of text in the middle": lambda right, count: [*right[:2], 7, *right[2:]],
    "what is no token": lambda right, count: [*right[:1], (VOCAB, -1, 2**70)[len(right) % 3], *right[1:]],
    "more than asked": lambda right, count: right + [3] * 100,
}


@cache
def _plain(family: str, dtype: str, seed: int):
    """Prompts, parameters, and what is sampled without drafts."""
    stops, ends = [(), ("12", ";")], [False, False, True]
    prompts, params = drawn_load(seed, 4, VOCAB, most_tokens=40, stop=stops, ignore_eos=ends)
    return prompts, params, Engine(model_of(family, dtype), ROOMY, ByteTokenizer()).generate(prompts, params)


def _draft(name, config, prompts, groups):
    if name == "history":
        history = HistoryDraft()
        for prompt, group in zip(prompts, groups):
            for completion in group:
                history.remember(prompt, completion.token_ids)
        return FirstOf(history, NGramDraft())
    if name == "a smaller model":
        return ModelDraft(build_model(replace(CONFIG, num_layers=1), "float32", seed=2), config)
    return NGramDraft() if name == "n-grams" else Oracle(groups, SPOILS[name])


FAMILIES = ["gpt_oss", "deepseek_v3", "qwen3_moe", "adapter"]
DRAFTS = ["n-grams", "history", "a smaller model", *SPOILS]


@pytest.mark.parametrize(
    ("name", "family", "dtype"),
    [
        *((name, "qwen3", "bfloat16") for name in DRAFTS),
        # Drafts that are right as far as a rejected one, so that keys behind it are left over in every layer's cache.
        *(("the second wrong", family, "float32") for family in FAMILIES),
        *(
            pytest.param(name, family, dtype, marks=pytest.mark.slow)
            for name, family, dtype in [
                ("a smaller model", "qwen3", "float32"),
                ("all right", "compiled", "bfloat16"),
                ("the second wrong", "compiled", "bfloat16"),
                ("a smaller model", "gpt_oss", "float32"),
                ("history", "deepseek_v3", "float32"),
                ("all right", "qwen3_moe", "float32"),
                ("history", "adapter", "float32"),
            ]
        ),
    ],
)
@settings(max_examples=3)
@given(
    seed=st.integers(0, 3),
    budget=st.sampled_from([19, 60, 300]),
    sequences=st.sampled_from([2, 5, 16]),
    cache_tokens=st.sampled_from([144, 304, 4096]),
    most=st.sampled_from([1, 4, 15]),
)
def test_drafts_change_no_bit_and_lose_no_page(name, family, dtype, seed, budget, sequences, cache_tokens, most):
    prompts, params, expected = _plain(family, dtype, seed)
    config = EngineConfig(budget, sequences, cache_tokens, draft_tokens=most)
    draft = _draft(name, config, prompts, expected)
    engine = Engine(model_of(family, dtype), config, ByteTokenizer(), draft)
    assert engine.generate(prompts, params) == expected
    assert all_pages_are_free(engine)
    statistics = engine.statistics
    assert statistics.tokens_sampled == sum(len(c.token_ids) for group in expected for c in group)
    assert statistics.guesses_accepted <= statistics.tokens_guessed
    assert statistics.runs_guessed <= statistics.tokens_guessed <= statistics.runs_guessed * most
    if name == "all right" and cache_tokens == 4096:
        assert statistics.guesses_accepted == statistics.tokens_guessed > 0


FREE = SamplingParams(max_tokens=60, seed=4, ignore_eos=True)


def test_the_time_that_drafts_save_is_counted_by_what_steps_without_take():
    model, found = model_of("qwen3"), []
    expected = Engine(model, ROOMY).generate([[9]], FREE)
    engine = Engine(model, EngineConfig(draft_tokens=7), draft=Oracle([[], expected[0]]))
    for _ in range(2):
        engine.generate([[9]], FREE)
        found.append((engine.statistics.guessed_seconds, engine.statistics.unguessed_seconds))
    assert found[0] == (0, 0), "of the first request nothing is known"
    assert 0 < found[1][0] < engine.statistics.sampling_seconds and found[1][1] > 0


def test_an_accepted_run_comes_as_tokens_of_their_own_each_with_what_was_asked_of_it():
    model, prompt = model_of("qwen3"), [9, 10, 11]
    params = replace(FREE, top_logprobs=2)
    plain = list(Engine(model, ROOMY).stream(prompt, params))
    expected = Engine(model, ROOMY).generate([prompt], params)
    engine = Engine(model, EngineConfig(draft_tokens=64), draft=Oracle(expected))
    assert list(engine.stream(prompt, params)) == plain
    done = engine.statistics
    assert done.steps < 10 and done.steps + done.guesses_accepted == 60 and done.runs_guessed <= done.steps
    # What was drafted right is in the cache, and found, as what was decoded.
    engine.generate([prompt + expected[0][0].token_ids], replace(params, max_tokens=1))
    assert done.prompt_tokens_reused == 48


def test_a_draft_that_proposes_no_whole_numbers_is_an_error_and_later_requests_are_sampled():
    model, params = model_of("qwen3"), replace(FREE, max_tokens=6)
    expected = Engine(model, ROOMY).generate([[9, 10]], params)
    draft = Oracle(expected * 2, lambda right, count: [1.5])
    engine = Engine(model, draft=draft)
    with pytest.raises(TypeError):
        engine.generate([[9, 10]], params)
    draft.spoil = lambda right, count: np.array(right)
    assert engine.generate([[9, 10]], params) == expected and all_pages_are_free(engine)


@settings(max_examples=6)
@given(
    seed=st.integers(0, 1000),
    actions=st.lists(st.sampled_from(["add", "step", "step", "abort", "update"]), max_size=30),
)
def test_no_page_is_lost_whatever_is_cancelled_when(seed, actions):
    draw, config = random.Random(seed), EngineConfig(max_tokens_per_step=40, max_sequences=5, cache_tokens=256)
    small = build_model(replace(CONFIG, num_layers=1), "float32", seed=2)
    engine = Engine(model_of("qwen3"), config, draft=FirstOf(HistoryDraft(), NGramDraft(), ModelDraft(small, config)))
    ids: list[int] = []
    for action in actions:
        if action == "add":
            prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 90))]
            ids.append(engine.add(prompt, SamplingParams(max_tokens=draw.randint(1, 30), n=draw.choice([1, 4]))))
        elif action == "abort" and ids:
            engine.abort(draw.choice(ids))
        elif action == "update":
            engine.weights_changed(1)
        else:
            engine.step()
    finish(engine)
    assert all_pages_are_free(engine) and not any(engine.allocator.ref_counts)


def test_new_weights_in_the_middle_of_a_text_are_those_that_drafts_are_checked_with():
    """And a smaller model that drafts forgets its keys."""
    old, new = (build_model(CONFIG, "float32", seed=seed) for seed in (2, 3))
    prompt, params = [9, 10, 11], SamplingParams(max_tokens=24, seed=4, ignore_eos=True, temperature=0.5)
    [[before]] = Engine(old, ROOMY).generate([prompt], params)
    model, config = build_model(CONFIG, "float32", seed=2), EngineConfig(draft_tokens=3)
    engine = Engine(model, config, draft=ModelDraft(model, config))
    (sample,) = engine.samples(engine.add(prompt, params))
    while sample.sampled < 8:
        engine.step()
    kept, accepted = sample.sampled, engine.statistics.guesses_accepted
    assert sample.completion().token_ids == before.token_ids[:kept] and accepted > 0
    model.load_state_dict(new.state_dict())
    engine.weights_changed(1)
    finish(engine)
    begun = replace(sample.completion(), finish_reason="abort")
    begun = replace(begun, token_ids=begun.token_ids[:kept], logprobs=begun.logprobs[:kept])
    undisturbed = Engine(new, ROOMY)
    (expected,) = undisturbed.samples(undisturbed.add(prompt, params, [begun]))
    finish(undisturbed)
    assert sample.completion() == expected.completion()
    assert engine.statistics.guesses_accepted == engine.statistics.tokens_guessed > accepted


def test_what_is_not_finite_behind_a_wrong_draft_breaks_nothing():
    # With a head of its own, which stays whole.
    model = build_model(replace(CONFIG, tie_embeddings=False), "float32", seed=2)
    params = replace(FREE, max_tokens=9)
    expected = Engine(model, ROOMY).generate([[9, 10]], params)
    poison = next(t for t in range(8, VOCAB) if t not in [*expected[0][0].token_ids, 9, 10])
    with torch.no_grad():
        model.embed_tokens.weight[poison] = float("nan")
    engine = Engine(model, draft=Oracle(expected, lambda right, count: [*right[:2], poison, poison]))
    assert engine.generate([[9, 10]], params) == expected
    assert engine.statistics.tokens_guessed > engine.statistics.guesses_accepted
    with pytest.raises(UserError, match="not finite"):
        engine.generate([[9, poison]], params)
    assert all_pages_are_free(engine)


def test_a_draft_takes_no_page_from_a_sequence_and_no_row_from_a_prompt():
    model, params = model_of("qwen3"), replace(FREE, max_tokens=16)
    prompts = [[9, 10] * 8, [11, 12] * 8, [13] * 16]
    expected = Engine(model, ROOMY).generate(prompts, params)
    # Six pages, which the three fill in the end; a prompt and its neighbours' tokens are all that a step takes.
    config = EngineConfig(max_tokens_per_step=18, max_sequences=4, cache_tokens=96, prefix_cache=False)
    engine = Engine(model, config, draft=Oracle(expected))
    assert engine.generate(prompts, params) == expected
    done = engine.statistics
    assert done.guesses_accepted > 15 and done.preemptions == 0 and done.prompt_tokens_computed == 48


def test_drafts_stay_within_the_rows_of_a_step_and_the_positions_of_the_model():
    model = build_model(replace(CONFIG, max_positions=64), "float32", seed=2)
    prompts, params = [[9, 10], [11, 12]], replace(FREE, max_tokens=62)
    expected = Engine(model, ROOMY).generate(prompts, params)
    seen = []
    model.register_forward_pre_hook(lambda _, given: seen.append((len(given[0]), int(given[1].max()))))
    config = EngineConfig(max_tokens_per_step=12, draft_tokens=64)
    engine = Engine(model, config, draft=Oracle(expected, SPOILS["more than asked"]))
    assert engine.generate(prompts, params) == expected
    rows, positions = zip(*seen)
    assert max(rows) == 12 and engine.statistics.guesses_accepted > 50
    assert max(positions) == 62, "the last token is drawn, and never computed"


def _sequence(tokens, prompt_length=None, params=FREE):
    return Sequence(0, 0, params, 0, list(tokens), len(tokens) if prompt_length is None else prompt_length, frozenset())


@pytest.mark.parametrize(
    ("tokens", "proposal"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], [4, 5, 1, 2]),
        ([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], [8, 1, 2, 3]),
        ([7, 1, 2, 3, 9, 6, 2, 3, 8, 1, 2, 3], [9, 6, 2, 3]),
        ([1, 2, 1, 2], [1, 2, 1, 2]),
        ([1, 2, 3], []),
    ],
    ids=["a match", "the latest of two", "the longest of two", "within what is drafted", "none"],
)
def test_n_grams_continue_the_latest_of_the_longest_matches(tokens, proposal):
    draft, sequence = NGramDraft(), _sequence(tokens[:1])
    for token in tokens[1:]:  # grows as in the engine
        draft.propose([sequence], [2])
        sequence.tokens.append(token)
    assert draft.propose([sequence], [4]) == [proposal]


def test_history_continues_as_most_completions_did_and_forgets_the_oldest_prompts():
    draft = HistoryDraft(capacity=20 + 4 * PROMPT, per_prompt=3)
    for completion in ([1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 5, 6]):
        draft.remember([9], completion)
    assert draft.propose([_sequence([9])], [8]) == [[1, 2, 5, 6]], "from the first token on"
    other = _sequence([9, 8, 1, 2], prompt_length=1)
    assert draft.propose([other], [2]) == [[5, 6]], "a match begins anywhere"
    other.tokens += [3]
    assert draft.propose([other], [2]) == [[4]]
    assert draft.propose([_sequence([8])], [2]) == [[]], "another prompt"
    del other
    draft.remember([9], [7, 7, 7, 7])  # the newest three stay
    assert draft.propose([_sequence([9])], [4])[0][:2] == [1, 2]
    for prompt in range(20, 23):
        draft.remember([prompt], [1] * 6)
    assert draft.propose([_sequence([9])], [4]) == [[]] and draft.propose([_sequence([22])], [2]) == [[1, 1]]


def test_history_is_what_the_engine_sampled_to_its_end():
    model, params = model_of("qwen3"), SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    history, prompts = HistoryDraft(), [[9, 10], [11, 12]]
    engine = Engine(model, draft=history)
    aborted = engine.add([9, 10], params)
    engine.step()
    engine.abort(aborted)
    first = engine.generate(prompts, params)
    assert engine.statistics.tokens_guessed == 0, "nothing is remembered of what was aborted"
    assert engine.generate(prompts, params) == first
    assert engine.statistics.guesses_accepted == engine.statistics.tokens_guessed >= 2 * 10


def test_a_smaller_model_of_the_same_vocabulary_drafts(tmp_path):
    model, params, prompts = model_of("qwen3"), replace(FREE, max_tokens=20), [[9, 10], [11, 12, 13]]
    save_model(model, tmp_path / "same")
    engine = Engine(model, EngineConfig(draft="model", draft_model=str(tmp_path / "same"), draft_tokens=4))
    assert engine.generate(prompts, params) == Engine(model, ROOMY).generate(prompts, params)
    save_model(build_model(replace(CONFIG, vocab_size=61), "float32"), tmp_path / "other")
    for folder, said in (
        (tmp_path / "other", "vocabulary of 61 tokens, but the model has 60"),
        ("", "draft_model is empty"),
        ("/no/such/folder", "no/such/folder"),
    ):
        with pytest.raises(UserError, match=said):
            Engine(model, EngineConfig(draft="model", draft_model=str(folder)))


def test_reinforcement_remembers_and_a_server_does_not():
    model = model_of("qwen3")
    assert isinstance(make_draft(EngineConfig(), model), NGramDraft)
    assert isinstance(make_draft(EngineConfig(), model, HistoryDraft()), FirstOf)
    assert isinstance(make_draft(EngineConfig(draft="ngram"), model, HistoryDraft()), NGramDraft)
    assert make_draft(EngineConfig(draft="none"), model, HistoryDraft()) is None


def _lengths(sequences, accepted, free=8, **options):
    """After each sequence's drafts of eight tokens, of which so many were accepted."""
    lengths = DraftLengths(15, free, **options)
    for _ in range(30):
        for sequence, count in zip(sequences, accepted):
            lengths.verified(sequence, 8, count)
    return lengths


def test_lengths_follow_what_was_accepted_and_how_many_rows_a_step_has():
    four, many = ([_sequence([1] * 4) for _ in range(count)] for count in (4, 64))
    counts = _lengths(four, [8, 8, 0, 0], free=64).choose(four, [63] * 4, rows=4, room=500)
    assert counts[:2] == [15, 15] and max(counts[2:]) <= 2
    lengths = _lengths(four, [8, 8, 8, 8])
    assert lengths.choose(four, [3, 0, 63, 63], rows=4, room=500)[:2] == [3, 0], "no more than the text may have"
    assert sum(lengths.choose(four, [63] * 4, rows=4, room=5)) == 5
    assert lengths.choose([], [], rows=100, room=5) == []
    # Of four tokens out of five that are right, few sequences check some, and 64 none: a row costs what it brings.
    assert 2 <= min(_lengths(four, [4] * 4).choose(four, [63] * 4, 4, 500)) <= 8
    assert not any(_lengths(many, [4] * 64).choose(many, [63] * 64, 64, 500))
    assert all(_lengths(many, [4] * 64, free=512).choose(many, [63] * 64, 64, 500))
    right = [8] * 4
    quick, slow, slowest = (_lengths(four, right, cost=cost).choose(four, [63] * 4, 4, 500) for cost in (0.0, 0.5, 1.0))
    assert sum(quick) == 60 > sum(slow) > sum(slowest) == 0, "slow drafts are short"


def test_where_drafts_do_not_pay_a_few_sequences_try_again_now_and_then():
    sequences = [_sequence([1] * 4) for _ in range(32)]
    lengths, tried = _lengths(sequences, [0] * 32), []
    for _ in range(4 * (RETRY_STEPS + 1)):
        counts = [0] * 32 if lengths.skips() else lengths.choose(sequences, [50] * 32, 32, 400)
        for sequence, count in zip(sequences, counts):
            if count:
                lengths.verified(sequence, count, 0)
        tried.append(sum(counts))
    assert Counter(tried) == {0: 4 * RETRY_STEPS, 2 * 3: 4}
