"""A generator that reports what no correct one does is dropped by name, and the run continues with the others."""

import contextlib
from dataclasses import replace

import pytest
import torch

from lockstep.config import EngineConfig
from lockstep.errors import RunStopped
from lockstep.generate import Engine, SamplingParams
from lockstep.model import build_model, preset
from lockstep.rl.generators.channel import Closed
from lockstep.rl.generators.pool_sampler import PoolSampler
from lockstep.rl.generators.remote import InvalidResponse, RemoteSample
from tests.rl.generators.peers import ConnectedGenerator, RecordedRemote, honest, join, pool_of, registry_of, wait_until

KEY = bytes(range(32))
PARAMS = SamplingParams(n=2, max_tokens=4, seed=1)
CORRECT = RemoteSample([7] * 4, [-1.0] * 4, [], [2] * 4, "length")
nan, inf = float("nan"), float("inf")

INVALID = [
    (dict(logprobs=[-1.0] * 3), "3 log-probabilities for 4 tokens"),
    (dict(routes=["AA=="] * 3), "3 routes for 4 tokens"),
    (dict(versions=[2] * 3), "3 versions for 4 tokens"),
    (dict(truncated_logprobs=[-1.0] * 4), "4 truncated log-probabilities for 4 tokens"),
    (dict(token_ids=[1, 2, 3, 100]), "token 100 outside a vocabulary of 100"),
    (dict(token_ids=[1, 2, 3, -1]), "token -1 outside a vocabulary"),
    (dict(logprobs=[-1.0, -1.0, -1.0, nan]), "log-probability nan"),
    (dict(logprobs=[-1.0, -1.0, -1.0, -inf]), "log-probability -inf"),
    (dict(logprobs=[-1.0, -1.0, -1.0, 0.5]), "log-probability 0.5"),
    (dict(versions=[3] * 4), "a token from weights version 3, which the run has not published"),
    (dict(versions=[1] * 4), "a token from weights version 1, but the request was sent at version 2"),
    (dict(token_ids=[7] * 9, logprobs=[-1.0] * 9, versions=[2] * 9), "9 tokens, but at most 4 were requested"),
    (dict(finish_reason="abort"), "finish_reason 'abort'"),
    (dict(token_ids=[7], logprobs=[-1.0], versions=[2]), "finish_reason 'length' after 1 of 4 tokens"),
    (dict(token_ids=[], logprobs=[], versions=[], finish_reason="stop"), "finished sample without any token"),
    # Otherwise the next generator would wait for an end that never comes, or continue behind it.
    (dict(token_ids=[7, 0, 7, 7]), "tokens after 0, which ends a sample"),
    (dict(token_ids=[7], logprobs=[-1.0], versions=[2], finish_reason=None), ""),
    (dict(token_ids=[5], logprobs=[-1.0], versions=[2], finish_reason=None), "last token of a sample without a finish"),
    (dict(finish_reason=None), "last token of a sample without a finish_reason"),
]


@pytest.mark.parametrize(("changes", "message"), INVALID)
def test_a_sample_is_checked_before_it_is_used(changes, message):
    one = RecordedRemote("one")
    pool = pool_of(one, vocab_size=100, eos_token_ids=(0, 5))
    pool.load_weights({"version": 2})
    pool.has_weights(one, 2)
    request = pool.begin([1, 2, 3], PARAMS)
    with pytest.raises(InvalidResponse, match=message) if message else contextlib.nullcontext():
        pool.sampled(one, [(request.id, 1, replace(CORRECT, **changes))])
    assert bool(request.samples[1].token_ids) == (not message)


def test_samples_that_do_not_exist_or_have_ended_and_weights_that_were_not_published_are_invalid():
    one = RecordedRemote("one")
    pool = pool_of(one)
    request, correct = pool.begin([1], PARAMS), replace(CORRECT, versions=[1] * 4)
    for index in (99, -1):
        with pytest.raises(InvalidResponse, match=f"sample {index} of a request for 2"):
            pool.sampled(one, [(request.id, index, correct)])
    pool.sampled(one, [(request.id, 0, correct)])
    with pytest.raises(InvalidResponse, match="already finished"):
        pool.sampled(one, [(request.id, 0, RemoteSample([], [], [], [], "stop"))])
    pool.load_weights({"version": 2})
    pool.has_weights(one, 2)
    for version in (1003, 1):
        with pytest.raises(InvalidResponse, match=f"weights version {version}"):
            pool.has_weights(one, version)
    # Of a request that has ended meanwhile, it is only late.
    pool.abort(request.id)
    pool.sampled(one, [(request.id, 1, correct)])
    assert not request.samples[1].token_ids


def test_our_engine_reports_no_log_probability_above_0():
    model = build_model(preset("qwen3:micro", 512), dtype="float32", seed=3)
    with torch.no_grad():
        model.norm.weight.mul_(300)  # so that one token has nearly all of the probability
    engine = Engine(model, EngineConfig(max_tokens_per_step=64, max_sequences=8, cache_tokens=2048))
    params = SamplingParams(n=8, max_tokens=20, seed=2, ignore_eos=True, top_p=0.9)
    found = [c for group in engine.generate([[1, 2], [5]], params) for c in group]
    values = [value for c in found for value in (*c.logprobs, *c.truncated_logprobs)]
    assert max(values) <= 0 and max(values) > -1e-6


# Over real connections.


def registry(**changes):
    return registry_of(KEY, vocab_size=100, **changes)


def sending(*messages):
    def answer(channel, message, version):
        for each in messages:
            channel.send(each)

    return answer


def changed(channel, message, version):
    honest(channel, message, version + 1000)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (changed, "a token from weights version 1003"),
        (sending({"kind": "has_weights", "version": 1003}), "weights version 1003"),
        (sending({"kind": "tokens", "samples": 5}), "not a message"),
        (sending([1, "\x1b[31mred"]), "not a message"),
    ],
)
def test_a_generator_that_sends_invalid_data_gets_no_more_requests_and_another_continues(caplog, answer, message):
    with registry() as (pool, port):
        pool.load_weights({"version": 3})
        wrong = ConnectedGenerator(port, KEY, answer, "wrong")
        pool.wait_for_weights()
        request = pool.begin([1, 2, 3], PARAMS)
        wait_until(lambda: not pool.names)
        assert not any(sample.token_ids for sample in request.samples)
        (line,) = [line for line in caplog.messages if line.startswith("wrong: ")]
        assert message in line and "gets no more requests" in line and line.isprintable()
        ConnectedGenerator(port, KEY, honest, "other")
        wait_until(lambda: not request.unfinished)
        assert [sample.token_ids for sample in request.samples] == [[7] * 4] * 2
        assert wrong.welcome["name"] == "wrong"
        assert "gets no more requests" in join(port, KEY, name="wrong")[1]["problem"]
        assert pool.ready == ["other"] and {name.split("/")[1] for name in pool.metrics()} == {"other"}


def test_a_run_whose_last_generator_sends_invalid_data_ends_and_says_why():
    with registry(start_seconds=1.0) as (pool, port):
        pool.load_weights({"version": 3})
        ConnectedGenerator(port, KEY, changed, "wrong")
        with pytest.raises(RunStopped, match="the last one, wrong: it sent invalid data .a token from weights vers"):
            PoolSampler(pool).generate([[1]], PARAMS)


@pytest.mark.parametrize("introduction", [dict(name="../up"), dict(name="a b"), dict(lockstep="9")])
def test_a_generator_whose_introduction_does_not_fit_is_told_why(caplog, introduction):
    with registry() as (pool, port):
        channel, answer = join(port, KEY, **introduction)
        with pytest.raises(Closed):
            channel.receive(20)
        wait_until(lambda: answer["problem"] in caplog.text)
        assert not pool.names
