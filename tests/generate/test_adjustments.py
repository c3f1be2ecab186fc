"""Biases, penalties and `min_tokens`: they change what is drawn as vLLM defines, and no log-probability of the whole
vocabulary."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import Engine, EngineConfig, SamplingParams, build_model, ops, score
from lockstep.data import ByteTokenizer
from lockstep.errors import UserError
from lockstep.generate import Completion
from lockstep.generate.adjustments import Adjustment, adjusted_logits
from lockstep.generate.driver import DriverEngine, follow
from lockstep.generate.grammars import Grammars, regex_grammar
from lockstep.model import preset
from lockstep.ops.vocabulary import Whole
from lockstep.parallel import close_world
from tests.generate.engines import drawn_load, finish
from tests.generate.test_tensor_parallel import model_of
from tests.parallel.launch import launch

TOKENIZER = ByteTokenizer()
END = 256
VOCAB = 260
"""Two more than the tokenizer's: a head may be padded."""


def _model():
    shape = replace(preset("qwen3:micro", VOCAB, (END,)), max_positions=300, num_layers=2)
    model = build_model(shape, "bfloat16", seed=3)
    with torch.no_grad():  # sharper logits than fresh weights give: draws that depend on all before them
        model.embed_tokens.weight.mul_(8)
    return model


MODEL = _model()
GRAMMARS = Grammars(TOKENIZER, VOCAB, [END])
CHOICES = {
    "logit_bias": [(), (), ((65, 5.0), (66, -100.0), (END, -3.5))],
    "frequency_penalty": [0.0, 0.0, 1.5, -0.5],
    "presence_penalty": [0.0, 0.0, 2.0],
    "repetition_penalty": [1.0, 1.0, 1.3, 0.8],
    "min_tokens": [0, 0, 1],
    "grammar": ["", "", regex_grammar("[a-f]{3,40}")],
}


def _dense(logits, params, prompt, sampled, end_ids):
    """The definition: of every token's logit, over tensors as large as the vocabulary."""
    logits = logits.clone()
    for token, bias in params.logit_bias:
        logits[token] += bias
    sampled_counts = torch.bincount(torch.tensor(sampled, dtype=torch.long), minlength=len(logits))
    seen = sampled_counts + torch.bincount(torch.tensor(prompt, dtype=torch.long), minlength=len(logits)) > 0
    rate = params.repetition_penalty
    logits = torch.where(seen, torch.where(logits > 0, logits / rate, logits * rate), logits)
    logits = logits - params.frequency_penalty * sampled_counts
    logits = logits - params.presence_penalty * (sampled_counts > 0)
    if len(sampled) < params.min_tokens:
        logits[list(end_ids)] = -torch.inf
    return logits


def _adjustment(params, prompt, sampled, end_ids=(END,)):
    adjustment = Adjustment(params, prompt, end_ids, None)
    for token in sampled:
        adjustment.accept(token, False)
    return adjustment


class Part(Whole):
    def __init__(self, vocab, first, stop):
        self.vocab, self.first, self.stop = vocab, first, stop


@settings(max_examples=60)
@given(st.data())
def test_adjusted_logits_are_those_of_the_definition_in_any_part_of_the_vocabulary(data):
    vocab, generator = 40, torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    tokens = st.lists(st.integers(0, vocab - 1), max_size=30)
    rows = [
        (
            SamplingParams(
                max_tokens=99,
                logit_bias=tuple(data.draw(st.dictionaries(st.integers(0, vocab - 1), st.floats(-100, 100))).items()),
                frequency_penalty=data.draw(st.sampled_from([0.0, -2.0, 1.25])),
                presence_penalty=data.draw(st.sampled_from([0.0, 0.5])),
                repetition_penalty=data.draw(st.sampled_from([1.0, 1.2, 0.5])),
                min_tokens=data.draw(st.integers(0, 20)),
            ),
            data.draw(tokens),
            data.draw(tokens),
        )
        for _ in range(data.draw(st.integers(1, 3)))
    ]
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    logits = (4 * torch.randn(len(rows), vocab, generator=generator)).to(dtype)
    before = logits.clone()
    expected = torch.stack([_dense(x.double(), *row, (7, 39)) for x, row in zip(logits, rows)])

    adjustments = [_adjustment(*row, end_ids=(7, 39)) for row in rows]
    found = adjusted_logits(logits, adjustments, Whole(vocab))
    assert torch.equal(logits, before)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=2e-5)  # float32: 3 roundings of up to 100
    cut = data.draw(st.integers(0, vocab))
    parts = [
        adjusted_logits(logits[:, first:stop], adjustments, Part(vocab, first, stop))
        for first, stop in ((0, cut), (cut, vocab))
    ]
    assert torch.equal(torch.cat([part.float() for part in parts], 1), found.float())


def test_the_repetition_penalty_is_that_of_transformers_bit_for_bit():
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = 4 * torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    prompt, sampled = [3, 9, 9, 30], [9, 31, 2]
    for penalty in (1.3, 0.7):
        expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + sampled]), logits.clone())
        params = SamplingParams(repetition_penalty=penalty)
        found = adjusted_logits(logits, [_adjustment(params, prompt, sampled)], Whole(50))
        assert torch.equal(found, expected) and not torch.equal(found, logits)


def _engine(**options):
    options = {"max_tokens_per_step": 24, "max_sequences": 5, "cache_tokens": 512} | options
    engine = Engine(MODEL, EngineConfig(**options), TOKENIZER)
    engine.grammars = GRAMMARS
    return engine


@pytest.fixture(scope="module")
def alone():
    """Loads of prompts and parameters, with the samples that each request has alone."""
    engine, loads = _engine(), []
    for seed in range(2):
        prompts, params = _load(seed)
        loads.append((prompts, params, [engine.generate([prompt], each)[0] for prompt, each in zip(prompts, params)]))
    return loads


def _load(seed, count=8):
    prompts, params = drawn_load(seed, count, 200, most_tokens=20, **CHOICES)
    return prompts, [replace(each, min_tokens=min(each.min_tokens, each.max_tokens)) for each in params]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cache_tokens": 128},  # preempts
        {"prefix_cache": False},
        {"draft": "none"},
        {"max_sequences": 1},
    ],
    ids=str,
)
def test_samples_of_a_mixed_batch_have_the_bits_they_have_alone(alone, options):
    engine = _engine(**options)
    for prompts, params, expected in alone:
        assert engine.generate(prompts, params) == expected
    assert (engine.statistics.preemptions > 0) == (options.get("cache_tokens") == 128)


def test_log_probabilities_are_the_trainers_however_logits_are_adjusted(alone):
    adjusted = 0
    for prompts, params, groups in alone:
        for prompt, param, group in zip(prompts, params, groups):
            adjusted += param.adjusts
            scores = score(MODEL, [prompt + c.token_ids for c in group], param.temperature or 1)
            for completion, trainer in zip(group, scores):
                assert torch.equal(torch.tensor(completion.logprobs), trainer[len(prompt) - 1 :])
    assert adjusted > 5


def test_truncated_log_probabilities_are_those_of_the_adjusted_distribution_after_its_cuts():
    prompt, top_k = [10, 20, 30, 20], 12
    params = SamplingParams(
        max_tokens=12, temperature=0.8, top_k=top_k, seed=4, n=3, frequency_penalty=1.0, presence_penalty=0.25,
        repetition_penalty=1.4, logit_bias=((97, 6.0),), min_tokens=12,
    )  # fmt: skip
    (group,) = _engine().generate([prompt], params)
    different = 0
    for completion in group:
        tokens = completion.token_ids
        with torch.no_grad():
            row = torch.tensor(prompt + tokens)
            hidden = MODEL(row, torch.arange(len(row)), ops.PackedAttention([len(row)]))
            logits = MODEL.logits(hidden).double()
        for place, (token, found) in enumerate(zip(tokens, completion.truncated_logprobs)):
            changed = _dense(logits[len(prompt) - 1 + place], params, prompt, tokens[:place], (END,)) / 0.8
            kept = changed.topk(top_k).indices
            assert token in kept
            expected = changed[token] - changed[kept].logsumexp(0)
            assert found == pytest.approx(float(expected), abs=1e-5)
            different += found != completion.logprobs[place]
    assert different > 20


def test_greedy_draws_take_the_likeliest_adjusted_token():
    free = _engine().generate([[5, 6]], SamplingParams(max_tokens=1, temperature=0))[0][0].token_ids[0]
    banned = SamplingParams(max_tokens=1, temperature=0, logit_bias=((free, -100.0),))
    assert _engine().generate([[5, 6]], banned)[0][0].token_ids[0] != free
    forced = SamplingParams(max_tokens=9, temperature=0, logit_bias=((77, 100.0),))
    assert _engine().generate([[5, 6]], forced)[0][0].token_ids == [77] * 9


def test_a_sample_does_not_end_before_min_tokens_and_may_then():
    always = ((END, 100.0),)
    for least in (0, 1, 6):
        params = SamplingParams(max_tokens=20, logit_bias=always, min_tokens=least, seed=1)
        ((completion,),) = _engine().generate([[1, 2]], params)
        assert len(completion.token_ids) == least + 1 and completion.finish_reason == "stop"
    params = SamplingParams(max_tokens=9, logit_bias=((77, 100.0),), stop_token_ids=(77,), min_tokens=4, seed=1)
    ((completion,),) = _engine().generate([[1, 2]], params)
    assert len(completion.token_ids) == 5 and completion.token_ids.index(77) == 4


def test_adjusted_samples_get_no_drafts_and_others_keep_theirs():
    repeated = [9, 10] * 20
    for penalty, drafted in ((0.0, True), (0.001, False)):
        engine = _engine(draft="auto")
        params = SamplingParams(max_tokens=60, temperature=0, presence_penalty=penalty, ignore_eos=True)
        engine.generate([repeated], params)
        assert (engine.statistics.tokens_guessed > 0) == drafted


@pytest.mark.parametrize("seed", range(3))
def test_an_engine_continues_adjusted_samples_that_another_has_begun(seed):
    prompts, params = _load(seed, count=4)
    for prompt, param in zip(prompts, params):
        (whole,) = _engine().generate([prompt], param)
        begun = [
            Completion(c.token_ids[:half], c.logprobs[:half], "abort", c.truncated_logprobs[:half])
            for c in whole
            for half in [len(c.token_ids) // 2]
        ]
        engine = _engine()
        samples = list(engine.samples(engine.add(prompt, param, begun)))
        finish(engine)
        assert [sample.completion() for sample in samples] == whole


def adjusted_on_ranks(ranks):
    world, model = model_of(ranks, 2, "qwen3:micro", "bfloat16", 259)
    model.config = replace(model.config, eos_token_ids=(END,))
    config = EngineConfig(max_tokens_per_step=37, max_sequences=7, cache_tokens=256, draft="none")
    found = None
    if world.is_main:
        engine = (DriverEngine if ranks > 1 else Engine)(model, config, TOKENIZER)
        prompts, params = _load(5, count=8)
        found = engine.generate(prompts, params)
        assert any(param.grammar for param in params) and any(param.repetition_penalty != 1 for param in params)
        scored = SamplingParams(max_tokens=2, seed=1, prompt_logprobs=2)
        (*_, last) = engine.stream(prompts[0], scored)
        found.append((last.prompt_scores.logprobs, last.prompt_scores.ranks, last.prompt_scores.top_logprobs))
        if ranks > 1:
            engine.end()
    else:
        follow(Engine(model, config, TOKENIZER))
    close_world(world)
    return found


def test_ranks_draw_adjusted_samples_as_one_process_does():
    (alone,) = launch(1, adjusted_on_ranks, 1)
    assert launch(2, adjusted_on_ranks, 2) == [alone, None]


def test_a_token_that_the_model_does_not_have_is_refused_and_so_is_a_bias_that_is_no_number():
    with pytest.raises(UserError, match="logit_bias has the token 260, but the model's vocabulary has 260"):
        _engine().generate([[1]], SamplingParams(logit_bias=((260, 1.0),)))
    for wrong in (((1, 101.0),), ((-1, 1.0),), ((1, float("nan")),), ((1,),)):
        with pytest.raises(UserError, match="logit_bias is"):
            SamplingParams(logit_bias=wrong)
    for name, value in (("frequency_penalty", 2.5), ("repetition_penalty", 0), ("min_tokens", 65)):
        with pytest.raises(UserError, match=name):
            SamplingParams(**{name: value})
