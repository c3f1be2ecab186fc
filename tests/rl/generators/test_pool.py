"""The generator pool completes every request exactly once while generators join, leave and report late."""

import re
import threading

import pytest

from lockstep.errors import RunStopped, UserError
from lockstep.generate import SamplingParams
from lockstep.rl.generators.pool_sampler import PoolSampler
from tests.rl.generators.peers import RecordedRemote, pool_of, report, wait_until

PARAMS = SamplingParams(n=2, max_tokens=3, seed=5)


def generating(sampler, prompts, params=PARAMS):
    """A call of `generate` that waits in a thread, and where its result or its error will be."""
    result = {}

    def generate():
        try:
            result["groups"] = sampler.generate(prompts, params)
        except Exception as error:
            result["error"] = error

    thread = threading.Thread(target=generate, daemon=True)
    thread.start()
    return thread, result


def test_requests_go_to_the_generator_with_the_fewest_samples_and_none_gets_twice_its_capacity():
    one, two = RecordedRemote("one"), RecordedRemote("two")
    pool = pool_of(one, two)
    requests = [pool.begin([1], PARAMS).id for _ in range(12)]
    assert [len(one.requests), len(two.requests)] == [4, 4]  # of 2 samples each: 8 at each, whose capacity is 4
    assert sorted([*one.requests, *two.requests]) == requests[:8]
    for index in (0, 1):
        report(pool, one, requests[0], index, [7], "stop")
    assert len(one.requests) == 5 and len(two.requests) == 4
    pool.abort(requests[1])
    assert two.calls[-2:] == [("abort", requests[1]), ("submit", requests[9])]


def test_a_request_larger_than_any_generator_goes_to_one_that_is_idle():
    small = RecordedRemote("small", capacity=1)
    pool = pool_of(small)
    pool.begin([1], SamplingParams(n=5, seed=1))
    pool.begin([2], SamplingParams(n=1, seed=1))
    assert list(small.requests) == [0]


def test_requests_of_a_lost_generator_continue_elsewhere_with_their_tokens_and_nothing_counts_twice():
    one, two = RecordedRemote("one"), RecordedRemote("two")
    pool = pool_of(one)
    thread, result = generating(PoolSampler(pool), [[1], [2]])
    wait_until(lambda: len(one.requests) == 2)
    report(pool, one, 0, 0, [10, 11])
    report(pool, one, 0, 1, [12, 13, 14], "length")
    pool.lost(one, "it is gone")
    report(pool, one, 0, 0, [99], "stop")  # on its way when it was given up
    pool.has_weights(one, 1)
    pool.join(two)
    assert not two.requests  # it has no weights
    pool.has_weights(two, 1)
    assert two.requests == {0: [[10, 11], [12, 13, 14]], 1: [[], []]}
    report(pool, one, 1, 0, [99], "stop")
    pool.lost(one, "it is gone")  # said twice, it changes nothing
    report(pool, two, 0, 0, [15], "length")
    report(pool, two, 0, 0, [99], "length")  # of a request that has ended
    for index in (0, 1):
        report(pool, two, 1, index, [20 + index], "stop")
    thread.join(10)
    assert [[c.token_ids for c in group] for group in result["groups"]] == [
        [[10, 11, 15], [12, 13, 14]],
        [[20], [21]],
    ]
    assert result["groups"][0][0].logprobs == [-1.0, -1.1, -1.5]
    assert [c.finish_reason for group in result["groups"] for c in group] == ["length", "length", "stop", "stop"]
    assert pool.ready == ["two"] and pool.metrics()["generators/two/held"] == 0


def test_a_generator_that_is_restarted_under_its_name_is_another():
    before, restarted = RecordedRemote("one"), RecordedRemote("one")
    pool = pool_of(before)
    request = pool.begin([1], PARAMS)
    assert pool.leave("one") is before
    pool.join(restarted)
    pool.has_weights(before, 1)
    assert not pool.ready
    pool.has_weights(restarted, 1)
    report(pool, before, request.id, 0, [99])
    pool.lost(before, "it is gone")
    assert pool.remote("one") is restarted and request.samples[0].token_ids == []
    assert restarted.requests == {request.id: [[], []]}


def test_a_generator_that_joins_gets_the_newest_weights_first_and_then_requests():
    one, two = RecordedRemote("one", capacity=1), RecordedRemote("two")
    pool = pool_of(one)
    first, second = pool.begin([1], PARAMS).id, pool.begin([2], PARAMS).id
    assert list(one.requests) == [first]
    pool.load_weights({"version": 2})
    pool.join(two)
    pool.has_weights(two, 2)
    assert two.calls == [("weights", 2), ("submit", second)]
    assert one.calls == [("weights", 1), ("submit", first), ("weights", 2)]
    assert pool.ready == ["one", "two"]
    waiting = threading.Thread(target=pool.wait_for_weights, daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()  # one has those of version 1
    pool.has_weights(one, 2)
    waiting.join(10)
    assert not waiting.is_alive()


def test_generators_that_finish_first_begin_all_that_waits_before_newer_weights():
    one = RecordedRemote("one", capacity=1)
    pool = pool_of(one, finish=True)
    first, second = pool.begin([1], PARAMS).id, pool.begin([2], PARAMS).id
    pool.load_weights({"version": 2})
    assert one.calls == [("weights", 1), ("submit", first), ("submit", second), ("weights", 2)]


def test_a_refused_request_and_logits_that_are_not_finite_are_errors_of_their_prompt():
    one = RecordedRemote("one")
    pool = pool_of(one)
    thread, result = generating(PoolSampler(pool), [[1]])
    wait_until(lambda: one.requests)
    pool.refused(one, 0, "too long\n")
    thread.join(10)
    assert isinstance(result["error"], UserError) and str(result["error"]) == r"too long\n"
    assert one.calls[-1] == ("abort", 0)
    thread, result = generating(PoolSampler(pool), [[1], [2]])
    wait_until(lambda: 2 in one.requests)
    for request, tokens, reason in ((1, [7], "stop"), (2, [], "error")):
        for index in (0, 1):
            report(pool, one, request, index, tokens, reason)
    thread.join(10)
    assert "prompt 1: its logits are not finite" in str(result["error"])


def test_a_run_without_generators_ends_after_start_seconds_and_says_what_to_do():
    with pytest.raises(UserError, match=r"no generator has been ready for 0 s .* None has been ready since .*; fix wh"):
        pool_of(start_seconds=0.0).wait_for_weights()
    one = RecordedRemote("one")
    pool = pool_of(one, start_seconds=0.5)
    threading.Event().wait(0.6)
    thread, result = generating(PoolSampler(pool), [[1]])
    wait_until(lambda: one.requests)  # the time counts from when the last one was lost
    pool.lost(one, "it is gone")
    pool.wait()
    thread.join(10)
    assert isinstance(result["error"], RunStopped)
    assert re.match(r"no generator has been ready for 0.5 s .*; their logs are in .* --resume", str(result["error"]))


def test_an_incompatible_generator_ends_the_run_if_the_run_started_it(caplog):
    one = RecordedRemote("one")
    pool = pool_of(one)
    pool.required = {"one"}
    pool.incompatible(RecordedRemote("guest"), "another model")
    pool.wait()
    assert "guest cannot sample for this run: another model" in caplog.text
    pool.incompatible(one, "another model")
    with pytest.raises(UserError, match="one: another model"):
        pool.wait()


def test_a_closed_sampler_ends_its_own_requests_and_no_others():
    one = RecordedRemote("one")
    pool = pool_of(one)
    closed, other = PoolSampler(pool, {}), PoolSampler(pool, {})
    waiting = [generating(each, [[number]]) for number, each in enumerate((closed, other))]
    wait_until(lambda: len(one.requests) == 2)
    closed.close()
    waiting[0][0].join(10)
    assert isinstance(waiting[0][1]["error"], RunStopped)
    with pytest.raises(RunStopped):
        closed.step()
    other.step()
    (request,) = set(one.requests) - {number for kind, number in one.calls if kind == "abort"}
    for index in (0, 1):
        report(pool, one, request, index, [index], "stop")
    waiting[1][0].join(10)
    assert [c.token_ids for c in waiting[1][1]["groups"][0]] == [[0], [1]]


def test_equal_requests_continue_with_separate_samples():
    one = RecordedRemote("one", capacity=8)
    pool = pool_of(one)
    before = PoolSampler(pool, {})
    for token, request in enumerate([before.add([1], PARAMS) for _ in range(3)]):
        report(pool, one, request, 0, [token])
    after = PoolSampler(pool, before.state())
    requests = [after.add([1], PARAMS) for _ in range(3)]
    assert [one.requests[request] for request in requests] == [[[0], []], [[1], []], [[2], []]]
    assert after.state() == before.state()
