"""The engine: the same tokens and the trainer's own bits under any load, and no page lost."""

import sys
import time
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import Completion, Engine, EngineConfig, SamplingParams, build_model, load_model, ops, score
from lockstep.config import CompileConfig, TrainConfig
from lockstep.errors import UserError
from lockstep.parallel import apply_compile
from lockstep.train import Trainer, pack
from lockstep.train.objective import NextTokenLoss
from tests.generate.engines import SHAPE, all_pages_are_free, drawn_load, finish

DTYPES = ["float32", "bfloat16"]


def _model(dtype, tie_embeddings=True):
    shape = replace(SHAPE, vocab_size=120, dim=64, head_dim=32, intermediate_size=96, max_positions=512)
    model = build_model(replace(shape, eos_token_ids=(7,), tie_embeddings=tie_embeddings), dtype, seed=2)
    with torch.no_grad():  # sharper logits than fresh weights give: draws that depend on them
        model.embed_tokens.weight.mul_(8)
    return model


@cache
def _compiled(dtype):
    model = _model(dtype)
    apply_compile(model, CompileConfig(backend="inductor"))
    return model


MODELS = {dtype: _model(dtype) for dtype in DTYPES}
ROOMY = EngineConfig(max_tokens_per_step=512, max_sequences=32, cache_tokens=8192)
APART = replace(ROOMY, prefix_cache=False)
"""Each sample computes its whole prompt itself."""


LOADS = dict(
    seed=st.integers(0, 1000),
    budget=st.sampled_from([19, 60, 300]),
    sequences=st.sampled_from([2, 5, 16]),
    cache_tokens=st.sampled_from([144, 304, 4096]),
    prefix_cache=st.booleans(),
)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=3)
@given(**LOADS)
def test_load_changes_no_bit_and_loses_no_page(dtype, seed, **config):
    check_load(MODELS[dtype], seed, config)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=2)
@given(**LOADS)
def test_load_changes_no_bit_of_a_compiled_model(dtype, seed, **config):
    check_load(_compiled(dtype), seed, config)


def check_load(model, seed, config):
    """An engine of `config` samples what one sequence at a time does, and the trainer computes the same."""
    prompts, params = drawn_load(seed, 5, 120, most_tokens=16)
    expected = [Engine(model, APART).generate([p], q)[0] for p, q in zip(prompts, params)]
    engine = Engine(model, EngineConfig(*(config[name] for name in LOADS if name != "seed")))
    groups = engine.generate(prompts, params)
    assert groups == expected
    assert all_pages_are_free(engine)
    for prompt, param, group in zip(prompts, params, groups):
        scores = score(model, [prompt + c.token_ids for c in group], param.temperature or 1.0)
        for completion, trainer in zip(group, scores):
            assert torch.equal(torch.tensor(completion.logprobs), trainer[len(prompt) - 1 :])
            assert len(completion.truncated_logprobs) == (len(completion.token_ids) if param.truncates else 0)


def test_a_completion_has_the_log_probabilities_that_its_tokens_were_drawn_with():
    model, prompt = MODELS["float32"], [5, 6, 7]
    params = SamplingParams(max_tokens=12, temperature=0.7, top_k=4, n=3, seed=1, ignore_eos=True)
    for completion in Engine(model, ROOMY).generate([prompt], params)[0]:
        tokens = torch.tensor(prompt + completion.token_ids)
        hidden = model(tokens, torch.arange(len(tokens)), ops.PackedAttention([len(tokens)]))[len(prompt) - 1 : -1]
        scaled = model.logits(hidden).double() / 0.7
        kept = scaled >= scaled.topk(4).values[:, -1:]
        left = torch.log_softmax(scaled.masked_fill(~kept, -torch.inf), -1)
        expected = left.gather(1, tokens[len(prompt) :, None])[:, 0]
        # float32 logits of up to 100 and their normaliser: 8e-6 each.
        torch.testing.assert_close(torch.tensor(completion.truncated_logprobs).double(), expected, rtol=0, atol=3e-5)
    alone = SamplingParams(max_tokens=4, top_k=1, seed=0, ignore_eos=True)
    assert Engine(model).generate([prompt], alone)[0][0].truncated_logprobs == [0.0] * 4, "what could not be otherwise"


@pytest.mark.parametrize(
    ("dtype", "length"), [("float32", 1), ("bfloat16", 15), ("float32", 16), ("bfloat16", 17), ("float32", 33)]
)
def test_equal_prompts_are_computed_once_and_every_sample_has_its_own_draws(dtype, length):
    model = MODELS[dtype]
    first, second = [3 * i % 120 for i in range(length)], [5 * i % 120 for i in range(20)]
    prompts = [second, first, first, second]
    params = [
        SamplingParams(max_tokens=9, n=3, temperature=20.0, seed=1),
        SamplingParams(max_tokens=20, n=4, seed=2, stop_token_ids=tuple(range(40))),
        SamplingParams(max_tokens=1, n=2, top_k=5, seed=3),
        SamplingParams(max_tokens=9, n=2, temperature=0.0),
    ]
    engine = Engine(model, ROOMY)
    groups = engine.generate(prompts, params)
    assert groups == Engine(model, APART).generate(prompts, params)
    assert len({tuple(completion.token_ids) for completion in groups[0]}) == 3
    # Copies are made of what was computed last; the last prompt finds its first page, and computes the rest again.
    assert engine.statistics.prompt_tokens_computed == 20 + length + 4
    assert all_pages_are_free(engine)


def test_a_step_with_as_many_samples_as_rows_is_no_decode_step_if_some_have_no_row():
    engine, params = Engine(MODELS["float32"], ROOMY), SamplingParams(max_tokens=20, n=4, seed=1, ignore_eos=True)
    engine.generate([[9, 8, 7]], params)  # decode steps of four rows are repeated from here on
    expected = Engine(MODELS["float32"], APART).generate([[1, 2, 3, 4]], params)
    assert engine.generate([[1, 2, 3, 4]], params) == expected


def test_a_prompt_that_a_running_sequence_has_arrived_at_is_a_copy_of_it():
    model, prompt = MODELS["float32"], list(range(30))
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    expected = Engine(model, APART).generate([prompt], params)[0][0]
    engine = Engine(model, replace(ROOMY, draft="none"))
    running = engine.samples(engine.add(prompt, params))[0]
    while len(running.tokens) < 43:
        engine.step()
    running.pages += [engine.allocator.allocate()]  # as for drafts that turned out wrong
    joins = engine.samples(engine.add(list(running.tokens), replace(params, max_tokens=27)))[0]
    finish(engine)
    assert engine.statistics.prompt_tokens_computed == 30, "nothing of the second prompt was computed"
    assert running.tokens == joins.tokens == prompt + expected.token_ids
    assert running.logprobs == expected.logprobs and joins.logprobs == expected.logprobs[13:]
    assert all_pages_are_free(engine)


GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def _same_with_prefixes_cached(model, ask, **config):
    """`ask` adds requests and returns their samples, which are the same whether or not the engine finds prefixes."""
    values = []
    for prefix_cache in (True, False):
        engine = Engine(model, EngineConfig(prefix_cache=prefix_cache, draft="none", **config))
        samples = ask(engine)
        finish(engine)
        values.append([(s.tokens, str(s.logprobs), s.finish_reason) for s in samples])
    assert values[0] == values[1]


def test_nobody_reads_a_copy_before_it_is_filled():
    """A lead whose page is one of two with equal content, of which the known one was given to others."""
    prompt = [3 * i % 110 for i in range(16)]

    def ask(engine):
        engine.add(prompt, replace(GREEDY, max_tokens=1))
        (running,) = engine.samples(engine.add(prompt, replace(GREEDY, max_tokens=40)))
        engine.step()
        engine.generate([[60 + i % 50 for i in range(90)]], replace(GREEDY, max_tokens=1))
        engine.step()
        joins = engine.samples(engine.add(list(running.tokens), GREEDY))
        return [running, *joins, *engine.samples(engine.add([*prompt, 9, 10, 11], GREEDY))]

    _same_with_prefixes_cached(MODELS["float32"], ask, cache_tokens=128)


def test_all_pages_that_a_copy_does_not_share_are_copied():
    """A lead whose pages nobody finds any more, since they were also a request's that is not finite."""
    model, prompt = _model("float32", tie_embeddings=False), [3 * i % 110 for i in range(32)]
    with torch.no_grad():
        model.embed_tokens.weight[119] = float("nan")

    def ask(engine):
        asked = [([*prompt, 119], 1), (prompt + [5 * i % 110 for i in range(68)], 2), ([*prompt, 50, 51, 52], 1)]
        return [s for tokens, n in asked for s in engine.samples(engine.add(tokens, replace(GREEDY, n=n)))]

    _same_with_prefixes_cached(model, ask, max_tokens_per_step=40)


def test_the_seconds_of_a_sample_are_counted_apart():
    engine = Engine(MODELS["float32"], EngineConfig(max_tokens_per_step=4, max_sequences=1, draft="none"))
    # One after the other: a prompt of two steps and three tokens each, and one of which a token is there already.
    params = SamplingParams(max_tokens=3, ignore_eos=True, seed=0)
    engine.add([1, 2, 3, 4, 5], params)
    engine.add([1, 2, 3], params, [Completion([9], [-1.0], "abort")])
    began = time.perf_counter()
    while not engine.statistics.samples_ended:
        engine.step()
    waited = time.perf_counter() - began
    finish(engine)
    elapsed, found = time.perf_counter() - began, engine.statistics
    assert (found.samples_ended, found.tokens_decoded) == (2, 2 + 1)
    parts = (found.prefill_seconds, found.decode_seconds)
    assert min(parts) > 0 and sum(parts) < elapsed and 0 < found.sampling_seconds < elapsed
    assert found.queue_seconds > waited, "of the second, until the first has ended"


def test_greedy_takes_the_likeliest_token_and_top_k_1_does_too():
    model = MODELS["float32"]
    prompt = [5, 9, 44]
    greedy = Engine(model).generate([prompt], SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))[0][0]
    cut = Engine(model).generate([prompt], SamplingParams(max_tokens=6, top_k=1, ignore_eos=True))[0][0]
    assert greedy.token_ids == cut.token_ids
    table = torch.stack([score(model, [prompt + greedy.token_ids[:3] + [t]])[0][-1] for t in range(120)])
    assert int(table.argmax()) == greedy.token_ids[3]


def test_stop_strings_are_found_across_tokens(bpe_tokenizer, model_folder):
    engine = Engine(load_model(model_folder), ROOMY, bpe_tokenizer)
    free = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=40, seed=3, ignore_eos=True))[0][0]
    pieces = [bpe_tokenizer.decode([t]) for t in free.token_ids]
    for span in (2, 3):
        at = next(i for i in range(3, 38) if all(p.isascii() and p for p in pieces[i : i + span]))
        stop = pieces[at][-1] + "".join(pieces[at + 1 : at + span])
        params = SamplingParams(max_tokens=40, seed=3, ignore_eos=True, stop=("世", stop))
        stopped = engine.generate([[1, 2, 3]], params)[0][0]
        assert stopped.finish_reason == "stop"
        text = bpe_tokenizer.decode(stopped.token_ids)
        assert stop in text and stop not in bpe_tokenizer.decode(stopped.token_ids[:-1])
    assert SamplingParams(stop="END").stop == ("END",) == SamplingParams(stop=("END",)).stop


def test_an_in_place_update_is_noticed_if_nobody_says_that_weights_changed():
    model = _model("float32")
    engine = Engine(model, ROOMY)
    prompt, params = list(range(50)), SamplingParams(max_tokens=8, seed=5, ignore_eos=True)
    engine.generate([prompt], params)
    with torch.no_grad():
        model.layers[0].mlp.down_proj.weight.mul_(30)
    completion = engine.generate([prompt], params)[0][0]
    assert torch.equal(torch.tensor(completion.logprobs), score(model, [prompt + completion.token_ids])[0][49:])
    assert engine.weights_version == 1
    engine.generate([prompt], params)
    assert engine.weights_version == 1, "nothing was written since"
    engine.weights_changed()
    assert engine.weights_version == 2
    replaced = {name: 2 * value for name, value in model.state_dict().items()}
    model.load_state_dict(replaced, assign=True)  # which no counter shows
    engine.weights_changed()
    engine.generate([prompt], params)
    with torch.no_grad():
        model.layers[0].mlp.down_proj.weight.mul_(30)
    engine.generate([prompt], params)
    assert engine.weights_version == 4, "a write to the new parameters is noticed again"


def _train(model):
    trainer = Trainer(model, TrainConfig(learning_rate=1e-2, warmup_steps=0), 1)
    trainer.step([pack([list(range(20))])], NextTokenLoss(19))


def _write_past_the_version_counter(model):
    for layer in model.layers:
        layer.mlp.down_proj.weight.data.mul_(30)


@pytest.mark.parametrize(("dtype", "update"), [("bfloat16", _train), ("float32", _write_past_the_version_counter)])
def test_a_stream_after_an_update_samples_from_the_new_weights_and_old_keys_are_forgotten(dtype, update):
    model = _model(dtype)
    engine = Engine(model, ROOMY)
    prompt, params = list(range(50)), SamplingParams(max_tokens=8, seed=5, ignore_eos=True)
    before = [e.logprob for e in engine.stream(prompt, params)]
    update(model)
    engine.weights_changed(1)
    events = list(engine.stream(prompt, params))
    log_probs = [e.logprob for e in events]
    assert log_probs != before and {e.weights_version for e in events} == {1}
    scores = score(model, [prompt + [e.token_id for e in events]])[0]
    assert torch.equal(torch.tensor(log_probs), scores[len(prompt) - 1 :])


def test_a_stream_gives_the_tokens_of_generate_and_closing_it_frees_its_pages():
    engine = Engine(MODELS["float32"], ROOMY)
    params = SamplingParams(max_tokens=12, seed=5, ignore_eos=True)
    expected = engine.generate([[1, 2, 3]], params)[0][0]
    events = list(engine.stream([1, 2, 3], params))
    assert [e.token_id for e in events] == expected.token_ids and events[-1].finish_reason == "length"
    stream = engine.stream([1, 2, 3], params)
    next(stream)
    assert engine.allocator.num_free < engine.allocator.num_pages
    stream.close()
    assert all_pages_are_free(engine)


def test_events_of_streams_read_in_turns_and_around_other_calls_belong_to_their_requests():
    engine = Engine(MODELS["float32"], ROOMY)
    params = [SamplingParams(max_tokens=10, temperature=20.0, seed=seed, ignore_eos=True) for seed in range(4)]
    expected = [engine.generate([[1, 2, 3]], p)[0][0].token_ids for p in params]
    first, second = engine.stream([1, 2, 3], params[0]), engine.stream([1, 2, 3], params[1])
    pairs = [(a.token_id, b.token_id) for a, b in zip(first, second, strict=True)]
    assert [list(ids) for ids in zip(*pairs)] == expected[:2]

    around = engine.stream([1, 2, 3], params[0])
    tokens = [next(around).token_id]
    added = engine.add([1, 2, 3], params[2])
    assert engine.generate([[1, 2, 3]], params[3])[0][0].token_ids == expected[3]
    assert tokens + [event.token_id for event in around] == expected[0]
    assert engine.has_work  # what the other calls sampled for `add` waits for `step`
    events = [event for _ in range(10) if engine.has_work for event in engine.step()]
    assert [event.token_id for event in events] == expected[2]
    assert {event.request_id for event in events} == {added} and not engine.has_work


def test_a_request_that_is_not_finite_ends_with_an_error_and_leaves_no_trace_in_others():
    model = _model("bfloat16", tie_embeddings=False)
    with torch.no_grad():
        model.embed_tokens.weight[77] = torch.nan
    config = EngineConfig(max_tokens_per_step=30, max_sequences=4, cache_tokens=256)
    params = SamplingParams(max_tokens=6, seed=3, ignore_eos=True)
    good, bad = [[5, 6, 7] * 9, [8] * 20, list(range(30, 65))], [[5, 6, 7] * 9 + [77, 9], [77], [8] * 20 + [77]]
    expected = [Engine(model, config).generate([p], params)[0][0] for p in good]
    engine = Engine(model, config)
    ids = [engine.add(prompt, params) for pair in zip(bad, good) for prompt in pair]
    events = finish(engine)
    for position, request_id in enumerate(ids):
        mine = [e for e in events if e.request_id == request_id]
        if position % 2:
            completion = expected[position // 2]
            assert [(e.token_id, e.logprob) for e in mine] == list(zip(completion.token_ids, completion.logprobs))
        else:
            assert [e.finish_reason for e in mine] == ["error"]
    assert all_pages_are_free(engine)
    with pytest.raises(UserError, match="prompt 1: its logits are not finite"):
        engine.generate([good[0], bad[1]], params)
    with pytest.raises(UserError, match="request .* not finite"):
        list(engine.stream(bad[0], params))
    # No page of theirs is found again, though its tokens are the same.
    with torch.no_grad():
        model.embed_tokens.weight[77] = 0.1
    for prompt in (*good, *bad):
        assert engine.generate([prompt], params) == Engine(model, config).generate([prompt], params)


class _InterruptAt:
    """A trace function that raises KeyboardInterrupt at the n-th line of the generator that is run."""

    def __init__(self, line: int):
        self.left = line

    def __call__(self, frame, event, argument):
        if "/lockstep/generate/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


@pytest.mark.slow
def test_an_interrupt_at_any_line_of_a_step_changes_no_later_result():
    model, small = MODELS["float32"], EngineConfig(max_tokens_per_step=24, max_sequences=3, cache_tokens=160)
    prompts = [list(range(40)), list(range(33)), [5, 6]]
    params = SamplingParams(max_tokens=6, seed=1, ignore_eos=True, n=2)
    expected = Engine(model, small).generate(prompts, params)
    engine, line, ended = Engine(model, small), 1, False
    while not ended:
        sys.settrace(_InterruptAt(line))
        try:
            ended = engine.generate(prompts, params) == expected
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert engine.generate(prompts, params) == expected, line
        assert all_pages_are_free(engine), line
        line += 1 + line // 12  # all of the first lines, and ever fewer of those that repeat them
    assert line > 1000


REFUSED = [
    ([], {}, "prompt is empty"),
    ([1, 120], {}, "token 120 at position 1"),
    ([1] * 510, {"max_tokens": 10}, "exceed the context of 512"),
    ([1] * 300, {"max_tokens": 10}, "do not fit in the cache of 256 tokens"),
    ([1], {"stop": ("x",)}, "need a tokenizer"),
    ([1], {"top_k": 2**63}, "top_k is 9223372036854775808; it must be from 0"),
    ([1], {"temperature": 1e-9}, "temperature is 1e-09; it must be 0, or from 0.01"),
    ([1], {"n": 10**9}, "n is 1000000000; it must be from 1 to 65536"),
    ([1], {"temperature": float("nan")}, "temperature is nan"),
    ([1], {"stop": ("END", "")}, "stop is .*not empty"),
]
OF_ANOTHER_TYPE = [
    ("temperature", True, "a number"),
    ("top_p", "a", "a number"),
    ("max_tokens", 1.5, "a whole number"),
    ("stop_token_ids", ("x",), "a tuple of whole numbers"),
    ("stop", 5, "a string, or a tuple of strings"),
]


def test_impossible_requests_are_refused_by_name():
    engine = Engine(MODELS["float32"], EngineConfig(cache_tokens=256))
    assert len(engine.generate([[1, 2]])[0]) == 1, "prompts alone are sampled with the default parameters"
    with pytest.raises(UserError, match="1 prompts but 0 sampling parameters"):
        engine.generate([[1, 2]], [])
    with pytest.raises(UserError, match="sequence 1 has 513 tokens, more than the model's context of 512"):
        score(engine.model, [[1, 2], [1] * 513])
    with pytest.raises(UserError, match=r"tensor\(1\) at position 0.*; a tensor's \.tolist\(\) is one"):
        engine.generate([torch.tensor([1, 2])])
    for prompt, params, message in REFUSED:
        with pytest.raises(UserError, match=message):
            engine.generate([prompt], SamplingParams(**params))
        assert all_pages_are_free(engine)
    for name, value, rule in OF_ANOTHER_TYPE:
        params = SamplingParams()
        object.__setattr__(params, name, value)  # the suite's own checking of types would come first
        with pytest.raises(UserError, match=f"{name} is .*; it must be {rule}"):
            params.__post_init__()


def test_the_likeliest_tokens_carry_exact_log_probabilities():
    model, prompt = MODELS["bfloat16"], [3, 1, 4]
    engine = Engine(model, ROOMY)
    engine.add(prompt, SamplingParams(max_tokens=3, temperature=0.7, top_logprobs=20, seed=1))
    events = [event for _ in range(3) for event in engine.step()]
    for position, event in enumerate(events):
        seen = prompt + [e.token_id for e in events[:position]]
        assert len(event.top_logprobs) == 20 and event.top_logprobs == sorted(event.top_logprobs, key=lambda t: -t[1])
        for token, log_prob in event.top_logprobs:
            assert score(model, [[*seen, token]], 0.7)[0][-1].item() == log_prob
