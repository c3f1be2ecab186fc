"""What generators did: their metrics and their timeline, idle time included."""

from dataclasses import fields

import pytest

import lockstep.rl.generators.work_log as work_log_module
from lockstep.generate import SamplingParams, Statistics
from lockstep.rl.generators.remote import RemoteSample, Request
from lockstep.rl.generators.work_log import WorkLog


class Clock:
    """One that stands still unless it is told to move."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now - 900

    def time(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(work_log_module, "time", clock)
    return clock


def did(**counts):
    return {each.name: 0 for each in fields(Statistics)} | {"weights_seconds": 0} | counts


def request_of(clock, given, first, ended, tokens):
    """One that has ended now; the others are seconds since it was asked."""
    began = clock.monotonic() - ended
    sample = RemoteSample([1] * tokens)
    params = SamplingParams(seed=1)
    return Request(0, [1], params, [sample], created_at=began, sent_at=began + given, first_token_at=began + first)


def phases(log):
    names = {e["pid"]: e["args"]["name"] for e in log.events() if e["ph"] == "M"}
    return [(names[e["pid"]], e["name"], e["ts"] / 1e6 - 1000, e["dur"] / 1e6) for e in log.events() if e["ph"] == "X"]


def test_queue_prefill_and_decode_are_means_since_the_last_time(clock):
    log = WorkLog()
    clock.now += 10
    before = did(
        sampling_seconds=5, tokens_sampled=20, samples_ended=2, queue_seconds=4, prefill_seconds=1, decode_seconds=6,
        tokens_decoded=12, packing_seconds=0.5,
    )  # fmt: skip
    log.update("one", before)
    log.record_request("one", request_of(clock, given=3, first=4, ended=7, tokens=4))
    found = log.metrics({"one": before}, {"one": 5})
    expected = {
        "busy": 0.5, "tokens_per_second": 4, "packing_seconds": 0.5, "held": 5, "queue_seconds": 2 + 3,
        "prefill_seconds": 0.5, "decode_seconds": 3, "token_seconds": 0.5, "first_token_seconds": 4,
        "weights_seconds": 0,
    }  # fmt: skip
    assert {name: found[f"generators/one/{name}"] for name in expected} == expected
    clock.now += 10
    after = {name: count + (name == "steps") for name, count in before.items()}
    found = log.metrics({"one": after}, {"one": 0})
    assert found["generators/one/busy"] == 0 and "generators/one/queue_seconds" not in found
    clock.now += 10  # started again
    found = log.metrics({"one": did(samples_ended=1, prefill_seconds=2)}, {"one": 0})
    assert found["generators/one/prefill_seconds"] == 2


def test_of_a_server_that_tells_nothing_there_is_what_the_trainer_sees(clock):
    log = WorkLog()
    log.update("http://one", {})
    clock.now += 10
    log.record_request("http://one", request_of(clock, given=1, first=2, ended=8, tokens=4))
    log.record_request("http://one", request_of(clock, given=1, first=2, ended=4, tokens=3))
    assert log.metrics({"http://one": {}}, {"http://one": 2}) == {
        "generators/http://one/held": 2,
        "generators/http://one/first_token_seconds": 2,
        "generators/http://one/decode_seconds": 4,
        "generators/http://one/token_seconds": 1.5,
    }
    assert phases(log) == [("http://one", "sample", 3, 7)]


def test_the_timeline_shows_when_a_generator_was_idle(clock):
    log = WorkLog()
    log.update("one", did(weights_seconds=1))
    clock.now += 5
    log.update("one", did(weights_seconds=1, sampling_seconds=2))
    clock.now += 1.01
    log.update("one", did(weights_seconds=1, sampling_seconds=3))
    clock.now += 4
    log.record_end("one")
    clock.now += 4
    log.update("one", did(weights_seconds=1))
    log.update("one", did(weights_seconds=2))
    log.update("two", did(weights_seconds=1))
    clock.now += 3
    expected = [
        ("one", "take weights", -1, 1),
        ("one", "idle", 0, 3),
        ("one", "sample", 3, 3.01),
        ("one", "idle", 6.01, 4),
        ("one", "take weights", 13.01, 1),
        ("one", "idle", 14.01, 3),
        ("two", "take weights", 13.01, 1),
        ("two", "idle", 14.01, 3),
    ]
    found = phases(log)
    assert [each[:2] for each in found] == [each[:2] for each in expected]
    for one, other in zip(found, expected):
        # Differences of floats around 1000.
        assert one[2:] == pytest.approx(other[2:], abs=1e-6)
