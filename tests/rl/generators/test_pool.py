"""The generator pool completes every request exactly once while generators join, leave and report late."""

import re
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

import lockstep.rl.generators.pool as pool_module
from lockstep.errors import RunStopped, UserError
from lockstep.generate import SamplingParams
from lockstep.rl.generators.caching_pool import CachingGeneratorPool
from lockstep.rl.generators.pool import GeneratorPool
from lockstep.rl.generators.remote import RemoteSample

PARAMS = SamplingParams(n=2, max_tokens=3, seed=5)


@dataclass(eq=False)
class RolloutReplay:
    """A generator that does nothing by itself: what it is told is written down."""

    name: str
    capacity: int = 4
    statistics: dict = field(default_factory=dict)
    asked: dict = field(default_factory=dict)
    """The tokens that were known of each sample, by the request's number."""
    done: list = field(default_factory=list)

    def submit(self, request):
        self.asked[request.id] = [list(sample.token_ids) for sample in request.samples]
        self.done.append(("ask", request.id))

    def abort(self, request_id):
        self.done.append(("abort", request_id))

    def load_weights(self, manifest):
        self.done.append(("weights", manifest["version"]))

    def close(self):
        self.done.append(("close",))


def pool_of(*remotes, start_seconds=60.0):
    pool = GeneratorPool(512, 4096, start_seconds)
    pool.load_weights({"version": 1})
    for remote in remotes:
        pool.join(remote)
        pool.has_weights(remote, 1)
    return pool


def tell(pool, remote, request, index, tokens, reason=None):
    values = [-token / 10 for token in tokens]
    pool.sampled(remote, [(request, index, RemoteSample(list(tokens), values, [], [1] * len(tokens), reason))])


def asked_in_the_background(pool, prompts, params=PARAMS):
    """A call of `generate` that waits in a thread, and where its result or its error will be."""
    came = {}

    def ask():
        try:
            came["groups"] = pool.generate(prompts, params)
        except Exception as error:
            came["error"] = error

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread, came


def wait_until(condition):
    turn = threading.Event()
    for _ in range(5000):
        if condition():
            return
        turn.wait(0.002)
    raise AssertionError("it does not come")


def test_requests_go_to_whom_has_the_least_to_do_and_none_gets_more_than_twice_its_room():
    one, two = RolloutReplay("one"), RolloutReplay("two")
    pool = pool_of(one, two)
    requests = [pool.add([1], PARAMS) for _ in range(12)]
    assert [len(one.asked), len(two.asked)] == [4, 4]  # of 2 samples each: 8 at each, who has room for 4
    assert sorted([*one.asked, *two.asked]) == requests[:8]
    for index in (0, 1):
        tell(pool, one, requests[0], index, [7], "stop")
    assert len(one.asked) == 5 and len(two.asked) == 4
    pool.abort(requests[1])
    assert two.done[-2:] == [("abort", requests[1]), ("ask", requests[9])]


def test_a_lost_ones_requests_go_on_elsewhere_with_their_tokens_and_nothing_counts_twice():
    one, two = RolloutReplay("one"), RolloutReplay("two")
    pool = pool_of(one)
    thread, came = asked_in_the_background(pool, [[1], [2]])
    wait_until(lambda: len(one.asked) == 2)
    tell(pool, one, 0, 0, [10, 11])
    tell(pool, one, 0, 1, [12, 13, 14], "length")
    pool.lost(one, "it is gone")
    tell(pool, one, 0, 0, [99], "stop")  # on its way when it was given up
    pool.has_weights(one, 1)
    pool.join(two)
    assert not two.asked  # it has no weights
    pool.has_weights(two, 1)
    assert two.asked == {0: [[10, 11], [12, 13, 14]], 1: [[], []]}
    tell(pool, one, 1, 0, [99], "stop")
    pool.lost(one, "it is gone")  # said twice, it changes nothing
    tell(pool, two, 0, 0, [15], "length")
    tell(pool, two, 0, 0, [99], "length")  # of a request that has ended
    for index in (0, 1):
        tell(pool, two, 1, index, [20 + index], "stop")
    thread.join(10)
    assert [[c.token_ids for c in group] for group in came["groups"]] == [[[10, 11, 15], [12, 13, 14]], [[20], [21]]]
    assert came["groups"][0][0].logprobs == [-1.0, -1.1, -1.5]
    assert [c.finish_reason for group in came["groups"] for c in group] == ["length", "length", "stop", "stop"]
    assert pool.ready == ["two"] and not pool._requests and not pool._assigned


def test_one_that_is_started_anew_under_its_name_is_another():
    before, anew = RolloutReplay("one"), RolloutReplay("one")
    pool = pool_of(before)
    request = pool.add([1], PARAMS)
    samples = pool.samples(request)
    assert pool.leave("one") is before
    pool.join(anew)
    pool.has_weights(before, 1)
    assert not pool.ready
    pool.has_weights(anew, 1)
    tell(pool, before, request, 0, [99])
    pool.lost(before, "it is gone")
    assert pool.remote("one") is anew and samples[0].token_ids == [] and anew.asked == {request: [[], []]}


def test_a_generator_that_joins_gets_the_newest_weights_first_then_what_waits():
    one, two = RolloutReplay("one", capacity=1), RolloutReplay("two")
    pool = pool_of(one)
    first, second = pool.add([1], PARAMS), pool.add([2], PARAMS)
    assert list(one.asked) == [first]
    pool.load_weights({"version": 2})
    pool.join(two)
    pool.has_weights(two, 2)
    assert two.done == [("weights", 2), ("ask", second)]
    assert one.done == [("weights", 1), ("ask", first), ("weights", 2)]
    assert pool.ready == ["one", "two"]
    waiting = threading.Thread(target=pool.wait_for_weights, daemon=True)
    waiting.start()
    assert waiting.is_alive()  # one has those of version 1
    pool.has_weights(one, 2)
    waiting.join(10)
    assert not waiting.is_alive()


def test_what_is_refused_or_not_finite_is_an_error_of_its_prompt_alone():
    one = RolloutReplay("one")
    pool = pool_of(one)
    thread, came = asked_in_the_background(pool, [[1]])
    wait_until(lambda: one.asked)
    pool.refused(one, 0, "too long")
    thread.join(10)
    assert isinstance(came["error"], UserError) and str(came["error"]) == "too long" and one.done[-1] == ("abort", 0)
    thread, came = asked_in_the_background(pool, [[1], [2]])
    wait_until(lambda: 2 in one.asked)
    for request, tokens, reason in ((1, [7], "stop"), (2, [], "error")):
        for index in (0, 1):
            tell(pool, one, request, index, tokens, reason)
    thread.join(10)
    assert "prompt 1: its logits are not finite" in str(came["error"])


def test_without_a_generator_for_too_long_the_run_ends_and_says_where_to_look():
    one = RolloutReplay("one")
    pool = pool_of(one, start_seconds=0.05)
    thread, came = asked_in_the_background(pool, [[1]])
    wait_until(lambda: one.asked)
    pool.lost(one, "it is gone")
    thread.join(10)
    assert isinstance(came["error"], RunStopped)
    assert re.match(r"no generator has been ready for 0.05 s .*; their logs are in .* --resume", str(came["error"]))


def test_a_run_that_no_generator_ever_joins_is_badly_set_up():
    pool = pool_of(start_seconds=0.0)
    with pytest.raises(
        UserError, match="no generator has been ready for 0 s .* None has been ready since the run start.*; fix what"
    ):
        pool.wait_for_weights()


def test_one_that_the_run_needs_and_that_does_not_fit_ends_it_but_a_guest_does_not(caplog):
    pool = pool_of(RolloutReplay("one"))
    pool.required = {"one"}
    pool.incompatible(RolloutReplay("guest"), "another model")
    pool.generate([], PARAMS)
    pool.incompatible(pool.remote("one"), "another model")
    with pytest.raises(UserError, match="one: another model"):
        pool.generate([[1]], PARAMS)


def test_a_request_that_is_too_large_for_anyone_goes_to_one_that_has_nothing_to_do():
    small = RolloutReplay("small", capacity=1)
    pool = pool_of(small)
    pool.add([1], SamplingParams(n=5, seed=1))
    pool.add([2], SamplingParams(n=1, seed=1))
    assert list(small.asked) == [0]


def test_the_time_without_a_generator_counts_from_when_the_last_one_was_lost(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(pool_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    one = RolloutReplay("one")
    pool = pool_of(one, start_seconds=10.0)
    now[0] = 1000.0
    pool.step()
    pool.lost(one, "it is gone")
    now[0] = 1009.0
    pool.step()
    now[0] = 1011.0
    with pytest.raises(RunStopped, match="no generator has been ready for 10 s"):
        pool.step()


class Watched(RemoteSample):
    """A sample that notes whether another thread could change it while it is copied."""

    free = True

    def completion(self):
        def try_to_change():
            self.free = self.lock.acquire(blocking=False)
            if self.free:
                self.lock.release()

        thread = threading.Thread(target=try_to_change)
        thread.start()
        thread.join()
        return super().completion()


def test_no_sample_goes_on_while_the_state_is_taken():
    pool = pool_of(RolloutReplay("one"))
    remembering = CachingGeneratorPool(pool, {})
    remembering.add([1], PARAMS)
    (request,) = remembering._requests.values()
    request.samples = [Watched(), Watched()]
    for sample in request.samples:
        sample.lock = pool.changed
    remembering.state()
    assert [sample.free for sample in request.samples] == [False, False]


def test_one_that_is_closed_ends_its_own_requests_and_nobody_elses():
    one = RolloutReplay("one")
    pool = pool_of(one)
    closed, other = CachingGeneratorPool(pool, {}), CachingGeneratorPool(pool, {})
    waiting = [asked_in_the_background(each, [[number]]) for number, each in enumerate((closed, other))]
    wait_until(lambda: len(one.asked) == 2)
    closed.close()
    waiting[0][0].join(10)
    assert isinstance(waiting[0][1]["error"], RunStopped)
    with pytest.raises(RunStopped):
        closed.step()
    other.step()
    (request,) = pool._requests
    for index in (0, 1):
        tell(pool, one, request, index, [index], "stop")
    waiting[1][0].join(10)
    assert [c.token_ids for c in waiting[1][1]["groups"][0]] == [[0], [1]]


def test_of_equal_requests_each_goes_on_with_samples_of_its_own():
    one = RolloutReplay("one", capacity=8)
    pool = pool_of(one)
    before = CachingGeneratorPool(pool, {})
    for token, request in enumerate([before.add([1], PARAMS) for _ in range(3)]):
        tell(pool, one, request, 0, [token])
    after = CachingGeneratorPool(pool, before.state())
    requests = [after.add([1], PARAMS) for _ in range(3)]
    assert [one.asked[request] for request in requests] == [[[0], []], [[1], []], [[2], []]]
    assert after.state() == before.state()
