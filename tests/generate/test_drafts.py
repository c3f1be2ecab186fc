"""Speculation: the very tokens and log-probabilities of decoding one by one, whatever is drafted."""

import dataclasses
import random
from collections import Counter
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import Engine, EngineConfig, SamplingParams, build_model, save_model
from lockstep.config import CompileConfig
from lockstep.data import ByteTokenizer
from lockstep.errors import UserError
from lockstep.generate.batch import BatchArrays
from lockstep.generate.drafts import Draft, FirstOf, HistoryDraft, ModelDraft, NGramDraft, first_layers, make_draft
from lockstep.generate.drafts.history import BEGIN, LONGEST, MOST_PLACES, PROMPT, Texts
from lockstep.generate.drafts.lengths import BACKOFF, MAX_BACKOFF, DraftLengths
from lockstep.generate.drafts.speculation import Speculation
from lockstep.generate.drafts.step_times import RECORDING_COST, SETTLED_AFTER, MovingMean, StepTimes
from lockstep.generate.sequence import Sequence
from lockstep.model import ModelConfig, preset
from lockstep.model.lora import lora_of
from lockstep.parallel import apply_compile

VOCAB = 60
CONFIG = ModelConfig(
    family="qwen3",
    vocab_size=VOCAB,
    dim=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=64,
    qk_norm=True,
    max_positions=512,
    eos_token_ids=(7,),
)
ROOMY = EngineConfig(max_tokens_per_step=512, max_sequences=32, cache_tokens=8192, draft="none")


@cache
def _model(dtype: str, compiled: bool = False):
    model = build_model(CONFIG, dtype, seed=2)
    with torch.no_grad():  # sharper logits than fresh weights give: texts that repeat themselves at times
        model.embed_tokens.weight.mul_(4)
    if compiled:
        apply_compile(model, CompileConfig(backend="inductor"), trains=False)
    return model


@cache
def _of_family(name: str):
    """Two layers of a family, or a model with an adapter that has a part in its draws."""
    config = preset("qwen3:micro" if name == "adapter" else f"{name}:micro", VOCAB)
    # The first of gpt-oss's has a window, the first of DeepSeek-V3's a dense feed-forward.
    config = dataclasses.replace(config, num_layers=2, eos_token_ids=(7,))
    if name == "adapter":
        config = dataclasses.replace(config, lora=lora_of(config, 4, 8.0, ["*_proj"]))
    model = build_model(config, "float32", seed=2)
    with torch.no_grad():
        model.embed_tokens.weight.mul_(4)
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("lora_B.weight"):
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(3))
    return model


class Oracle(Draft):
    """Knows what will be drawn, and spoils it as told."""

    def __init__(self, answers: dict[tuple[int, int, tuple[int, ...]], list[int]], spoil):
        self.answers, self.spoil = answers, spoil

    def propose(self, sequences, counts):
        return [self._propose(s, count) for s, count in zip(sequences, counts)]

    def _propose(self, sequence, count):
        whole = self.answers.get((sequence.seed, sequence.index, tuple(sequence.tokens[: sequence.prompt_length])), [])
        return self.spoil(whole[sequence.sampled :][:count], count)


SPOILS = {
    "all right": lambda right, count: right,
    "all wrong": lambda right, count: [(t + 1) % VOCAB for t in right],
    "the second wrong": lambda right, count: [*right[:1], *((t + 1) % VOCAB for t in right[1:2]), *right[2:]],
    "end of text in the middle": lambda right, count: [*right[:2], 7, *right[2:]],
    "not in the vocabulary": lambda right, count: [*right[:1], VOCAB, *right[1:]],
    "less than any token": lambda right, count: [*right[:2], -1, *right[2:]],
    "larger than a tensor takes": lambda right, count: [*right[:2], 2**70, *right[2:]],
    "more than asked": lambda right, count: right + [3] * 100,
    "nothing": lambda right, count: [],
}


def _forced(monkeypatch):
    """Always as many drafts as there is room for: the clock has no say."""

    def choose(self, sequences, limits, rows, room, fits):
        counts = []
        for limit in limits:
            counts.append(max(0, min(limit, self.most, room)))
            room -= counts[-1]
        return counts

    monkeypatch.setattr(DraftLengths, "choose", choose)
    monkeypatch.setattr(DraftLengths, "backs_off", lambda self, sequences: False)


def _load(seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    draw = random.Random(seed)
    common = [draw.randrange(8, VOCAB) for _ in range(40)]
    prompts = [common[: draw.choice([0, 20, 40])] + [draw.randrange(VOCAB)] * draw.randint(1, 40) for _ in range(4)]
    params = [
        SamplingParams(
            max_tokens=draw.randint(1, 40),
            temperature=draw.choice([0.0, 0.4, 1.0]),
            top_k=draw.choice([0, 0, 5]),
            top_p=draw.choice([1.0, 0.8]),
            min_p=draw.choice([0.0, 0.05]),
            n=draw.choice([1, 3]),
            seed=draw.randrange(1000),
            top_logprobs=draw.choice([0, 0, 2]),
            stop=draw.choice([(), ("12", ";")]),
            ignore_eos=draw.random() < 0.3,
        )
        for _ in prompts
    ]
    return prompts, params


def _values(groups):
    return [[(c.token_ids, c.logprobs, c.truncated_logprobs, c.finish_reason) for c in group] for group in groups]


def _answers(prompts, params, groups):
    return {
        ((q.seed + index * 0x9E3779B97F4A7C15) % 2**63, index, tuple(p)): completion.token_ids
        for p, q, group in zip(prompts, params, groups)
        for index, completion in enumerate(group)
    }


def _drafts(model, config, prompts, params, groups):
    history = HistoryDraft()
    for prompt, group in zip(prompts, groups):
        for completion in group:
            history.remember(prompt, completion.token_ids)
    answers = _answers(prompts, params, groups)
    return {
        "n-grams": NGramDraft(),
        "history": FirstOf(history, NGramDraft()),
        "first layers": ModelDraft(first_layers(model, 1), config),
        **{f"oracle, {name}": Oracle(answers, spoil) for name, spoil in SPOILS.items()},
    }


DRAFTS = ["n-grams", "history", "first layers", *(f"oracle, {name}" for name in SPOILS)]


@pytest.mark.parametrize(
    "dtype, compiled",
    [
        ("bfloat16", False),
        pytest.param("float32", False, marks=pytest.mark.slow),
        pytest.param("bfloat16", True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", DRAFTS)
@settings(max_examples=3, deadline=None)
@given(
    seed=st.integers(0, 1000),
    budget=st.sampled_from([19, 60, 300]),
    sequences=st.sampled_from([2, 5, 16]),
    cache_tokens=st.sampled_from([144, 304, 4096]),
    most=st.sampled_from([1, 4, 15]),
)
def test_drafts_change_no_bit_and_lose_no_page(name, dtype, compiled, seed, budget, sequences, cache_tokens, most):
    _check_drafts(_model(dtype, compiled), name, seed, budget, sequences, cache_tokens, most)


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "qwen3_moe", "adapter"])
@settings(max_examples=2, deadline=None)
@given(
    # Drafts that are right as far as a rejected one, so that keys behind it are left over in every layer's cache.
    name=st.sampled_from(["first layers", "oracle, all right", "oracle, the second wrong", "history"]),
    seed=st.integers(0, 1000),
    budget=st.sampled_from([19, 60, 300]),
    sequences=st.sampled_from([2, 5, 16]),
    cache_tokens=st.sampled_from([144, 304, 4096]),
    most=st.sampled_from([1, 4, 15]),
)
def test_drafts_change_no_bit_in_any_family(family, name, seed, budget, sequences, cache_tokens, most):
    _check_drafts(_of_family(family), name, seed, budget, sequences, cache_tokens, most)


def _check_drafts(model, name, seed, budget, sequences, cache_tokens, most):
    prompts, params = _load(seed)
    expected = Engine(model, ROOMY, ByteTokenizer()).generate(prompts, params)
    config = EngineConfig(budget, sequences, cache_tokens, draft_tokens=most)
    with pytest.MonkeyPatch.context() as patch:
        _forced(patch)
        engine = Engine(model, config, ByteTokenizer(), draft=_drafts(model, config, prompts, params, expected)[name])
        assert _values(engine.generate(prompts, params)) == _values(expected)
    assert engine.allocator.num_free == engine.allocator.num_pages and not engine.has_work
    statistics = engine.statistics
    assert statistics.tokens_sampled == sum(len(c.token_ids) for group in expected for c in group)
    assert statistics.guesses_accepted <= statistics.tokens_guessed
    assert statistics.runs_guessed <= statistics.tokens_guessed <= statistics.runs_guessed * most
    if name == "oracle, all right" and cache_tokens == 4096:
        assert statistics.guesses_accepted == statistics.tokens_guessed


def test_the_time_that_drafts_save_is_counted_by_what_steps_without_take(monkeypatch):
    _forced(monkeypatch)
    model, prompt = _model("float32"), [9]
    params = SamplingParams(max_tokens=17, seed=4, ignore_eos=True)
    answers = {(4, 0, tuple(prompt)): Engine(model, ROOMY).generate([prompt], params)[0][0].token_ids}
    engine = Engine(model, EngineConfig(draft_tokens=7), draft=Oracle(answers, SPOILS["all right"]))
    times = engine._speculation.lengths.times
    times.record(1, 0.5)  # a step of one row
    # Of the clock's own figures nothing exact could be asserted.
    monkeypatch.setattr(times, "record", lambda rows, seconds, pace: None)
    engine.generate([prompt], params)
    assert engine.statistics.steps == 3, "twice seven drafts and a draw, and a last token"
    assert engine.statistics.unguessed_seconds == 2 * 8 * 0.5
    assert 0 < engine.statistics.guessed_seconds < engine.statistics.sampling_seconds
    plain = Engine(model, ROOMY)
    plain.generate([prompt], params)
    assert plain.statistics.guessed_seconds == plain.statistics.unguessed_seconds == 0


def test_no_time_is_saved_by_batches_smaller_than_any_that_ran_without_drafts():
    speculation = Speculation(NGramDraft(), 60, 100, DraftLengths(4), None)
    plain = [SimpleNamespace(count=1, rows=1)] * 32
    drafted = [SimpleNamespace(count=1, rows=3)] * 4
    assert speculation.timed(drafted, 0.012) == (0.0, 0.0), "nothing has run yet"
    speculation = Speculation(NGramDraft(), 60, 100, DraftLengths(4), None)
    assert speculation.timed(plain, 0.032) == (0.0, 0.0)
    assert speculation.timed(drafted, 0.012) == (0.0, 0.0)
    speculation.timed([SimpleNamespace(count=1, rows=1)] * 4, 0.004)
    assert speculation.timed(drafted, 0.012) == (0.012, 0.004)
    assert speculation.timed([SimpleNamespace(count=5, rows=5), *drafted], 1.0) == (0.0, 0.0), "it computed a prompt"


def test_an_accepted_run_comes_as_tokens_of_their_own_each_with_what_was_asked_of_it(monkeypatch):
    _forced(monkeypatch)
    model, prompt = _model("float32"), [9, 10, 11]
    params = SamplingParams(max_tokens=60, seed=4, top_logprobs=2, ignore_eos=True)
    plain = list(Engine(model, ROOMY).stream(prompt, params))
    answers = {(4, 0, tuple(prompt)): [event.token_id for event in plain]}
    engine = Engine(model, EngineConfig(draft_tokens=64), draft=Oracle(answers, SPOILS["all right"]))
    assert [dataclasses.replace(e, request_id=0) for e in engine.stream(prompt, params)] == plain
    assert engine.statistics.steps == 1, "the prompt and drafts on four pages in one step"
    assert engine.statistics.runs_guessed == 1 and engine.statistics.guesses_accepted == 59
    # What was drafted right is in the cache, and found, as what was decoded.
    longer = prompt + [event.token_id for event in plain]
    engine.generate([longer], dataclasses.replace(params, max_tokens=1))
    assert engine.statistics.prompt_tokens_reused == 48


@pytest.mark.parametrize("wrong", [[1.5], ["a"]])
def test_a_draft_that_proposes_no_whole_numbers_is_an_error_and_the_engine_goes_on(monkeypatch, wrong):
    _forced(monkeypatch)
    model, params = _model("float32"), SamplingParams(max_tokens=6, seed=4, ignore_eos=True)
    draft = Oracle({(4, 0, (9, 10)): [3] * 9}, lambda right, count: wrong)
    engine = Engine(model, draft=draft)
    with pytest.raises(TypeError):
        engine.generate([[9, 10]], params)
    draft.spoil = lambda right, count: np.array(right)
    assert _values(engine.generate([[9, 10]], params)) == _values(Engine(model, ROOMY).generate([[9, 10]], params))
    assert engine.allocator.num_free == engine.allocator.num_pages and not engine.has_work


def test_a_draft_that_fails_as_it_is_told_of_an_end_holds_nobody_up(monkeypatch):
    engine = Engine(_model("float32"), draft=Oracle({}, SPOILS["nothing"]))
    monkeypatch.setattr(Oracle, "ended", lambda self, sequence: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.generate([[9, 10]], SamplingParams(max_tokens=3, seed=4, ignore_eos=True))
    assert not engine.has_work and engine.allocator.num_free == engine.allocator.num_pages


def test_text_ends_in_the_middle_of_an_accepted_run(monkeypatch):
    _forced(monkeypatch)
    model, prompt = _model("float32"), [9, 10, 11]
    free = SamplingParams(max_tokens=20, seed=4, ignore_eos=True)
    [[plain]] = Engine(model, ROOMY).generate([prompt], free)
    stop = ByteTokenizer().decode(plain.token_ids[5:7])
    draft = Oracle({(4, 0, tuple(prompt)): plain.token_ids}, SPOILS["all right"])
    engine = Engine(model, tokenizer=ByteTokenizer(), draft=draft)
    [[stopped]] = engine.generate([prompt], dataclasses.replace(free, stop=stop))
    assert stopped.finish_reason == "stop" and stopped.token_ids == plain.token_ids[: len(stopped.token_ids)]
    assert len(stopped.token_ids) <= 7 and engine.allocator.num_free == engine.allocator.num_pages


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 1000),
    actions=st.lists(st.sampled_from(["add", "step", "step", "abort", "update"]), max_size=30),
)
def test_no_page_is_lost_whatever_is_cancelled_when(seed, actions):
    draw = random.Random(seed)
    config = EngineConfig(max_tokens_per_step=40, max_sequences=5, cache_tokens=256)
    draft = FirstOf(HistoryDraft(), NGramDraft(), ModelDraft(first_layers(_model("float32"), 1), config))
    with pytest.MonkeyPatch.context() as patch:
        _forced(patch)
        engine = Engine(_model("float32"), config, draft=draft)
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
        while engine.has_work:
            engine.step()
    assert engine.allocator.num_free == engine.allocator.num_pages
    assert not any(engine.allocator.ref_counts)


def test_new_weights_in_the_middle_of_a_text_are_those_that_drafts_are_checked_with(monkeypatch):
    _forced(monkeypatch)
    old, new = build_model(CONFIG, "float32", seed=2), build_model(CONFIG, "float32", seed=3)
    prompt, params = [9, 10, 11], SamplingParams(max_tokens=24, seed=4, ignore_eos=True, temperature=0.5)

    def sampled(config, draft):
        model = build_model(CONFIG, "float32", seed=2)
        engine = Engine(model, config, draft=draft and draft(model))
        request = engine.add(prompt, params)
        samples = engine.samples(request)
        while samples[0].sampled < 8:
            engine.step()
        kept = samples[0].sampled
        with torch.no_grad():
            for own, other in zip(model.parameters(), new.parameters()):
                own.copy_(other)
        engine.weights_changed(1)
        while engine.has_work:
            engine.step()
        return samples[0].completion(), kept

    config = EngineConfig(draft_tokens=3)
    layers = lambda model: ModelDraft(first_layers(model, 2), config)  # noqa: E731
    completion, kept = sampled(config, layers)
    [[before]] = Engine(old, ROOMY).generate([prompt], params)
    assert completion.token_ids[:kept] == before.token_ids[:kept]
    rest = dataclasses.replace(params, max_tokens=24)
    engine = Engine(new, ROOMY)
    begun = dataclasses.replace(before, token_ids=before.token_ids[:kept], logprobs=before.logprobs[:kept])
    request = engine.add(prompt, rest, [dataclasses.replace(begun, finish_reason="abort")])
    samples = engine.samples(request)
    while engine.has_work:
        engine.step()
    assert completion.token_ids == samples[0].completion().token_ids
    assert completion.logprobs == samples[0].completion().logprobs


def test_what_is_not_finite_behind_a_wrong_draft_breaks_nothing(monkeypatch):
    _forced(monkeypatch)
    # With a head of its own, which stays whole.
    model = build_model(dataclasses.replace(CONFIG, tie_embeddings=False), "float32", seed=2)
    [[plain]] = Engine(model, ROOMY).generate([[9, 10]], SamplingParams(max_tokens=9, seed=4, ignore_eos=True))
    poison = next(t for t in range(8, VOCAB) if t not in [*plain.token_ids, 9, 10])
    with torch.no_grad():
        model.embed_tokens.weight[poison] = float("nan")
    draft = Oracle({(4, 0, (9, 10)): plain.token_ids}, lambda right, count: [*right[:2], poison, poison])
    engine = Engine(model, draft=draft)
    params = SamplingParams(max_tokens=9, seed=4, ignore_eos=True)
    assert _values(engine.generate([[9, 10]], params)) == _values([[plain]])
    assert engine.statistics.tokens_guessed > 0
    with pytest.raises(UserError, match="not finite"):
        engine.generate([[9, poison]], params)
    assert engine.allocator.num_free == engine.allocator.num_pages


def test_a_draft_takes_no_page_from_a_sequence_and_no_row_from_a_prompt(monkeypatch):
    _forced(monkeypatch)
    model, params = _model("float32"), SamplingParams(max_tokens=16, seed=1, ignore_eos=True)
    prompts = [[9, 10] * 8, [11, 12] * 8, [13] * 16]
    expected = Engine(model, ROOMY).generate(prompts, params)
    # Six pages, which the three fill in the end; a prompt and its neighbours' tokens are all that a step takes.
    config = EngineConfig(max_tokens_per_step=18, max_sequences=4, cache_tokens=96, prefix_cache=False)
    draft = Oracle(_answers(prompts, [params] * 3, expected), SPOILS["all right"])
    engine = Engine(model, config, draft=draft)
    assert _values(engine.generate(prompts, params)) == _values(expected)
    assert engine.statistics.guesses_accepted > 20 and engine.statistics.preemptions == 0
    assert engine.statistics.prompt_tokens_computed == 48


texts = st.lists(st.text("ab", max_size=20), min_size=1, max_size=4)


@given(texts, st.text("ab", max_size=20), st.booleans(), st.integers(1, 9))
def test_texts_continue_where_the_longest_end_occurred_as_most_of_them_did(completions, sampled, whole, count):
    texts, last = Texts(completions), BEGIN * whole + sampled[-LONGEST + 1 :]
    # By the definition: what precedes each place, and the length of the end that agrees with it.
    agreeing = {
        place: max(k for k in range(len(last) + 1) if texts.text[:place].endswith(last[len(last) - k :]))
        for place in range(len(texts.text) - 1, 1, -1)
    }
    longest = max(agreeing.values())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockstep.generate.drafts.history.MOST_PLACES", 99)  # all of them
        places = texts.places_after(last)
    assert places == [place for place, length in agreeing.items() if length == longest >= 2]
    draft = texts.continued(places, count)
    assert len(draft) <= count and BEGIN not in draft
    for number, token in enumerate(draft):
        held = [p for p in places if texts.text.startswith(draft[:number], p)]
        following = Counter(texts.text[p + number] for p in held)
        assert following[token] == max(n for t, n in following.items() if t != BEGIN)
    if len(draft) < count:
        assert all(texts.text[p + len(draft)] == BEGIN for p in places if texts.text.startswith(draft, p))


def test_a_frequent_end_is_found_at_its_newest_places_only():
    texts = Texts(["ab" * 100, "ab" * 10 + "c"])
    assert texts.places_after("xab")[:2] == [texts.text.rindex("c"), texts.text.rindex("c") - 2]
    assert len(texts.places_after("xab")) == MOST_PLACES and texts.places_after("b") == texts.places_after("") == []


def _sequence(tokens, prompt_length=None, max_tokens=64):
    params = SamplingParams(max_tokens=max_tokens)
    return Sequence(0, 0, params, 0, list(tokens), len(tokens) if prompt_length is None else prompt_length, frozenset())


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 9))
def test_n_grams_continue_the_latest_of_the_longest_matches(tokens, count):
    draft, sequence = NGramDraft(), _sequence(tokens[:1])
    for token in tokens[1:]:  # grows as in the engine
        draft.propose([sequence], [2])
        sequence.tokens.append(token)
    lengths = {
        end: next((k for k in range(3) if end - k < 0 or tokens[end - k] != tokens[-1 - k]), 3)
        for end in range(len(tokens) - 1)
    }
    longest = max(lengths.values(), default=0)
    [proposal] = draft.propose([sequence], [count])
    if longest < 2:
        assert proposal == []
    else:
        text, start = list(tokens), 1 + max(end for end, length in lengths.items() if length == longest)
        for place in range(count):
            text.append(text[start + place])
        assert proposal == text[len(tokens) :]


def test_history_goes_on_as_most_completions_did_and_forgets_the_oldest_prompts():
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


def test_history_is_what_the_engine_sampled_before(monkeypatch):
    _forced(monkeypatch)
    model, params = _model("float32"), SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    history = HistoryDraft()
    engine = Engine(model, draft=history)
    first = engine.generate([[9, 10], [11, 12]], params)
    drafted, steps = engine.statistics.tokens_guessed, engine.statistics.steps
    assert drafted == 0
    assert _values(engine.generate([[9, 10], [11, 12]], params)) == _values(first)
    assert engine.statistics.guesses_accepted == engine.statistics.tokens_guessed >= 2 * 15
    assert engine.statistics.steps - steps <= 3
    assert not history._places and not history._texts, "nothing is kept of sequences that have ended"


def test_what_is_aborted_or_broken_is_forgotten_though_somebody_holds_it(monkeypatch):
    # Ranks that share a model draft alike: nothing may depend on how long one of them keeps an object.
    _forced(monkeypatch)
    model = build_model(dataclasses.replace(CONFIG, tie_embeddings=False), "float32", seed=2)
    history = HistoryDraft()
    history.remember([9, 10], [11, 12, 13])
    engine = Engine(model, draft=history)
    held = []
    for ends in ("abort", "error"):
        request = engine.add([9, 10], SamplingParams(max_tokens=30, n=2, seed=1, ignore_eos=True))
        held.append(engine.samples(request))
        engine.step()  # of whose samples only the first computes the prompt, and may draft on
        engine.step()
        assert len(history._places) == 2 and len(history._texts) == 1
        if ends == "abort":
            engine.abort(request)
        else:
            with torch.no_grad():
                model.embed_tokens.weight.fill_(float("nan"))
            engine.weights_changed(1)
            while engine.has_work:
                engine.step()
        assert {s.finish_reason for s in held[-1]} == {ends}
        assert not history._places and not history._texts
    assert len(history._completions) == 1, "only what came to its end is remembered"


def test_a_step_has_no_more_rows_than_its_budget(monkeypatch):
    model, prompts = _model("float32"), [[9, 10], [11, 12]]
    params = SamplingParams(max_tokens=40, seed=1, ignore_eos=True)
    expected = Engine(model, ROOMY).generate(prompts, params)
    _forced(monkeypatch)
    rows = []
    prepare = BatchArrays.prepare
    monkeypatch.setattr(BatchArrays, "prepare", lambda *a: (rows.append(sum(c.rows for c in a[1])), prepare(*a))[1])
    draft = Oracle(_answers(prompts, [params] * 2, expected), SPOILS["all right"])
    engine = Engine(model, EngineConfig(max_tokens_per_step=12, draft_tokens=64), draft=draft)
    assert _values(engine.generate(prompts, params)) == _values(expected)
    assert max(rows) == 12 and engine.statistics.guesses_accepted > 50


def test_a_draft_ends_where_the_context_does(monkeypatch):
    _forced(monkeypatch)
    model = build_model(dataclasses.replace(CONFIG, max_positions=32), "float32", seed=2)
    params = SamplingParams(max_tokens=22, seed=1, ignore_eos=True)
    expected = Engine(model, ROOMY).generate([[9] * 10], params)
    config = EngineConfig(cache_tokens=32, draft_tokens=64)
    engine = Engine(model, config, draft=Oracle(_answers([[9] * 10], [params], expected), SPOILS["more than asked"]))
    positions = []
    prepare = BatchArrays.prepare
    monkeypatch.setattr(
        BatchArrays, "prepare", lambda *a: (positions.append(max(c.start + c.rows for c in a[1])), prepare(*a))[1]
    )
    assert _values(engine.generate([[9] * 10], params)) == _values(expected)
    assert max(positions) == 31, "the last token is drawn, and never computed"


def test_a_smaller_model_of_the_same_vocabulary_drafts(tmp_path, monkeypatch):
    _forced(monkeypatch)
    model, params = _model("float32"), SamplingParams(max_tokens=20, seed=3, ignore_eos=True)
    save_model(first_layers_of_its_own(model), tmp_path)
    config = EngineConfig(draft="model", draft_model=str(tmp_path), draft_tokens=4)
    engine = Engine(model, config)
    prompts = [[9, 10], [11, 12, 13]]
    assert _values(engine.generate(prompts, params)) == _values(Engine(model, ROOMY).generate(prompts, params))
    layers = Engine(model, EngineConfig(draft="layers", draft_layers=2, draft_tokens=4))
    layers.generate(prompts, params)
    assert engine.statistics == layers.statistics, "the same weights draft the same"
    save_model(build_model(dataclasses.replace(CONFIG, vocab_size=61), "float32"), tmp_path / "other")
    with pytest.raises(UserError, match="vocabulary of 61 tokens, but the model has 60"):
        Engine(model, EngineConfig(draft="model", draft_model=str(tmp_path / "other")))


def test_the_first_layers_of_a_model_with_an_adapter_draft_with_it(monkeypatch):
    _forced(monkeypatch)
    model, params = _of_family("adapter"), SamplingParams(max_tokens=20, seed=3, ignore_eos=True)
    layers = first_layers(model, 1)
    assert {name.split(".")[1] for name in layers.config.lora.modules} == {"0"}
    assert layers.state_dict().keys() == {n for n in model.state_dict() if not n.startswith("layers.1.")}
    engine = Engine(model, EngineConfig(draft="layers", draft_layers=1, draft_tokens=4))
    prompts = [[9, 10], [11, 12, 13]]
    assert _values(engine.generate(prompts, params)) == _values(Engine(model, ROOMY).generate(prompts, params))
    # All of what tells such a draft from its model taken away, each draft is right: its adapter has its part in them.
    for name, parameter in model.named_parameters():
        if name.startswith("layers.1.") and name.endswith(("o_proj.weight", "down_proj.weight", "lora_B.weight")):
            parameter.data.zero_()
    engine = Engine(model, EngineConfig(draft="layers", draft_layers=1, draft_tokens=4))
    engine.generate(prompts, params)
    assert engine.statistics.guesses_accepted == engine.statistics.tokens_guessed > 0


def first_layers_of_its_own(model):
    small = build_model(dataclasses.replace(CONFIG, num_layers=2), "float32")
    small.load_state_dict(first_layers(model, 2).state_dict())
    return small


@pytest.mark.parametrize(
    "settings_of_engine, said",
    [
        ({"draft": "layers"}, "draft_layers is 0; a draft of the model's first layers takes from 1 to 2"),
        ({"draft": "layers", "draft_layers": 3}, "draft_layers is 3"),
        ({"draft": "model"}, "draft_model is empty"),
        ({"draft": "model", "draft_model": "/no/such/folder"}, "no/such/folder"),
    ],
)
def test_a_draft_that_does_not_fit_is_named(settings_of_engine, said):
    with pytest.raises(UserError, match=said):
        Engine(_model("float32"), EngineConfig(**settings_of_engine))


def test_reinforcement_remembers_and_a_server_does_not():
    model = _model("float32")
    assert isinstance(make_draft(EngineConfig(), model), NGramDraft)
    assert isinstance(make_draft(EngineConfig(), model, HistoryDraft()), FirstOf)
    assert isinstance(make_draft(EngineConfig(draft="ngram"), model, HistoryDraft()), NGramDraft)
    assert make_draft(EngineConfig(draft="none"), model, HistoryDraft()) is None


def _lengths(seconds):
    lengths = DraftLengths(15)
    for rows, each in seconds.items():
        lengths.times.record(rows, each)
    return lengths


FREE = {1: 1.0, 16: 1.01, 64: 1.1, 256: 1.2}
LINEAR = {1: 1.0, 16: 16.0, 64: 64.0, 256: 256.0}


def test_lengths_follow_what_was_accepted_and_what_a_row_costs():
    sequences = [_sequence([1] * 4) for _ in range(4)]
    good, bad = sequences[:2], sequences[2:]
    lengths = _lengths(FREE)
    for _ in range(30):
        for sequence in good:
            lengths.verified(sequence, 8, 8)
        for sequence in bad:
            lengths.verified(sequence, 8, 0)
    counts = lengths.choose(sequences, [63] * 4, rows=4, room=500)
    assert counts[:2] == [15, 15] and max(counts[2:]) <= 2
    lengths._hold = 0
    assert lengths.choose(sequences, [3, 0, 63, 63], rows=4, room=500)[:2] == [3, 0]
    assert sum(lengths.choose(sequences, [63] * 4, rows=4, room=5)) == 5
    dear = _lengths(LINEAR)
    dear._all, dear._per_sequence = lengths._all, lengths._per_sequence
    assert dear.choose(sequences, [63] * 4, rows=4, room=500) == [0] * 4, "a token costs as much as it brings"


def test_what_drafting_takes_counts_and_where_there_is_no_draft_few_are_asked_for():
    sequences = [_sequence([1] * 4) for _ in range(2)]
    lengths = _lengths(FREE)
    assert sum(lengths.choose(sequences, [63] * 2, rows=2, room=500)) > 0
    for _ in range(20):
        lengths.drafted([2, 2], 4, 6.0, 2)
    lengths._hold = 0
    assert lengths.choose(sequences, [63] * 2, rows=2, room=500) == [0, 0], "a draft takes three steps' time"
    lengths = _lengths(FREE)
    lengths.compared = True
    for seconds in (60.0, 4.0):
        lengths.chose(seconds)
        lengths.drafted([1], 1, 0.0, 2)
    lengths.compared = False
    lengths.chose(0.001)
    assert lengths._choosing.mean == 4.0, "nothing was compared"
    lengths.compared = True
    counts = lengths.choose(sequences, [63] * 2, rows=2, room=500)
    assert sum(counts) > 8, "to choose takes as long for many tokens"
    lengths.chose(240.0)
    lengths._hold = 0
    assert sum(lengths.choose(sequences, [63] * 2, rows=2, room=500)) > 8, "a hiccup of the machine is none of its time"
    for _ in range(10):
        lengths.chose(240.0)
    lengths._hold = 0
    assert lengths.choose(sequences, [63] * 2, rows=2, room=500) == [0, 0]
    lengths, asked = _lengths(FREE), 0
    for _ in range(200):
        if not lengths.backs_off(2) and any(counts := lengths.choose(sequences, [63] * 2, rows=2, room=500)):
            lengths.drafted([c for c in counts if c], 0, 0.0, 2)
            asked += 1
    assert 200 // 9 <= asked <= 200 // 8 + 5


def test_those_that_the_step_waits_for_get_more():
    sequences = [_sequence([1], max_tokens=10), _sequence([1], max_tokens=500)]
    lengths = _lengths({1: 1.0, 2: 1.0, 4: 1.05, 8: 1.4, 16: 2.5, 64: 10.0})
    short, long = lengths.choose(sequences, [9, 499], rows=2, room=100)
    assert long > short


def test_where_drafts_do_not_pay_they_are_tried_seldom():
    sequences = [_sequence([1] * 4) for _ in range(32)]
    lengths = _lengths({32: 1.0, 64: 2.0, 512: 16.0})
    drafted = []
    for _ in range(400):
        counts = [0] * 32 if lengths.backs_off(32) else lengths.choose(sequences, [50] * 32, rows=32, room=400)
        for sequence, count in zip(sequences, counts):
            if count:
                lengths.verified(sequence, count, 0)
        drafted.append(sum(counts))
    late = drafted[100:]
    assert lengths.backs_off(32) and not lengths.backs_off(20), "with fewer sequences a row costs less"
    assert 0 < sum(late) <= 4 * 3 * (len(late) // BACKOFF + 1), "a few sequences, now and then"


def test_a_slow_start_stops_no_drafts():
    """The first steps take long, since code and weights are read for the first time: it looks as if recording gained
    as much, and steps of more rows would take no time once they are recorded."""
    lengths = DraftLengths(15)
    for _ in range(2):
        lengths.times.record(4, 15.0, "unrecorded")
    lengths.times.record(4, 60.0, "recording")
    for _ in range(5):
        lengths.times.record(4, 3.0)
    lengths.times.record(2, 8.0, "unrecorded")
    assert lengths.times.of(np.array([2, 4])).tolist() == [1.5 + RECORDING_COST * 12.0, 3.0], "half of what 4 rows take"
    lengths.times.record(8, 9.0, "unrecorded")
    assert lengths.times.of(np.array([4, 8])).tolist() == [3.0, 3.0 + RECORDING_COST * 6.0], "8 rows show the gain"
    lengths.times.record(16, 30.0, "unrecorded")
    assert lengths.times.of(np.array([4, 16])).tolist() == [3.0, 24.0 + RECORDING_COST * 6.0]
    lengths.times.record(8, 3.5)
    assert lengths.times.of(np.array([4, 8])).tolist() == [3.0, 3.5]
    sequences = [_sequence([1] * 4) for _ in range(4)]
    assert sum(lengths.choose(sequences, [63] * 4, rows=4, room=500)) >= 4


def test_tries_that_were_all_wrong_are_made_less_often():
    sequence = _sequence([1] * 4)
    lengths = _lengths({1: 1.0, 2: 4.0, 512: 2000.0})
    tries = []

    def tried(steps: int, accepted: int) -> int:
        before = len(tries)
        for _ in range(steps):
            if lengths.backs_off(1):
                continue
            if count := lengths.choose([sequence], [50], rows=1, room=400)[0]:
                tries.append(count)
                lengths.drafted([count], count, 0.0, 1)
                lengths.verified(sequence, count, accepted)
        return len(tries) - before

    often, seldom = tried(2 * BACKOFF, 0), tried(8 * MAX_BACKOFF, 0)
    assert often == 1 and 2 <= seldom <= 8
    # A draft that has nothing costs little: it is asked as often as any, though its drafts were wrong before.
    lengths.times.record(2, 1.0)
    asked = 0
    for _ in range(100):
        if not lengths.backs_off(1) and any(counts := lengths.choose([_sequence([1] * 4)], [50], rows=1, room=400)):
            lengths.drafted(counts, 0, 0.0, 1)
            asked += 1
    assert asked >= 10
    lengths = _lengths({1: 1.0, 2: 4.0, 512: 2000.0})
    tried(2 * MAX_BACKOFF, 1)
    assert tried(8 * BACKOFF, 1) >= 4, "one was right"


@pytest.mark.parametrize(
    "seconds, mean, counted",
    [
        ([90.0], 0.0, 0.0), ([90.0, 1.0], 1.0, 1.0), ([1.0, 90.0], 1.0, 4.0), ([90.0, 90.0, 1.0], 1.0, 1.0),
        ([1.0, 1.0, 2.0], 1.2, 2.0), ([1.0, 1.0, 90.0], 1.6, 6.4),
    ],
)  # fmt: skip
def test_what_is_usual_has_no_part_in_a_hiccup_whenever_it_comes(seconds, mean, counted):
    usual = MovingMean()
    *_, last = map(usual.update, seconds)
    assert (usual.mean, last) == pytest.approx((mean, counted))


def test_what_pays_stays_for_some_steps_for_the_same_sequences():
    lengths, sequences = _lengths(FREE), [_sequence([1] * 4) for _ in range(2)]

    def choose(who, limit=63, room=500):
        return lengths.choose(who, [limit] * 2, rows=2, room=room)

    first = choose(sequences)
    assert min(first) > 2 and lengths.compared
    for limit in (63, 2, 63):
        lengths.verified(sequences[0], 1, 1)
        assert choose(sequences, limit) == [min(each, limit) for each in first] and not lengths.compared
    lengths.verified(sequences[0], 1, 1)
    assert choose(sequences) and lengths.compared, "after three steps"
    lengths.verified(sequences[0], 1, 1)
    assert choose([sequences[0], _sequence([1] * 4)]) and lengths.compared, "for others"
    assert sum(choose(sequences, room=3)) == 3 and lengths.compared
    lengths.verified(sequences[0], 1, 1)
    assert sum(choose(sequences, room=2)) == 2 and lengths.compared, "less room"


@pytest.mark.parametrize("size, stay", [(3, True), (4, False)])
def test_what_pays_stays_while_drafts_are_wrong_only_if_its_size_has_run(size, stay):
    """A size that is not recorded yet takes long: a choice by mistake would cost that several times."""
    lengths, sequence = _lengths({1: 1.0, size: 1.0, 5: 40.0}), _sequence([1] * 4)
    assert lengths.choose([sequence], [2], rows=1, room=2) == [2]
    lengths.verified(sequence, 2, 0)
    lengths.choose([sequence], [2], rows=1, room=2)
    assert lengths.compared != stay


@pytest.mark.parametrize("ran, stays", [(1, True), (SETTLED_AFTER, False)])
def test_a_try_goes_on_while_it_is_right_if_its_size_is_new(ran, stays):
    lengths, sequence = _lengths({1: 1.0, 3: 9.0, 512: 2000.0}), _sequence([1] * 4)
    for _ in range(ran - 1):
        lengths.times.record(3, 9.0)
    lengths._holds_if_rejected = True  # as after a choice that paid
    counts = [0]
    while not any(counts):
        counts = [0] if lengths.backs_off(1) else lengths.choose([sequence], [50], rows=1, room=400)
        lengths.chose(0.1)
    assert counts == [2] and lengths.trying
    lengths.drafted(counts, 2, 0.1, 1)
    lengths.wasted()
    lengths.verified(sequence, 2, 2)
    assert lengths.backs_off(1) != stays, "it has cost more than it may"
    if stays:
        assert lengths.choose([sequence], [50], rows=1, room=400) == [2] and not lengths.compared
        lengths.verified(sequence, 2, 0)
        lengths.choose([sequence], [50], rows=1, room=400)
        assert lengths.compared, "its drafts were wrong"


def test_times_are_learnt_and_a_disturbed_step_is_forgotten():
    times = StepTimes()
    assert times.most_rows == 0, "nothing is drafted before a plain step has run"
    times.record(8, 1.0)
    assert times.most_rows == 16 and times.of(np.array([8, 16])).tolist() == [1.0, 1.0]
    times.record(16, 2.0)
    assert times.of(np.array([4, 12, 24])).tolist() == [1.0, 1.5, 3.0]
    times.record(8, 50.0)
    times.record(8, 1.0)
    assert times.of(np.array([8])).tolist() == [1.0]
    for _ in range(100):
        times.record(8, 1.8)
    assert times.of(np.array([8]))[0] == pytest.approx(1.8, abs=0.01)
