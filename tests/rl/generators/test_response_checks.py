"""A generator that says what cannot be so gets no more requests, by name; over real connections."""

import contextlib
import os
import resource
import socket
import threading

import pytest
import torch

from lockstep.config import EngineConfig
from lockstep.errors import RunStopped, UserError, one_line
from lockstep.generate import Engine, SamplingParams
from lockstep.model import build_model, preset
from lockstep.observe.report import parity_meaning
from lockstep.rl.generators import channel as wire
from lockstep.rl.generators.channel import Closed, Listener, call
from lockstep.rl.generators.pool import GeneratorPool
from lockstep.rl.generators.registry import GeneratorRegistry
from tests.rl.generators.liars import Generator, honest, join, send_raw, silent_callers, truth
from tests.rl.generators.test_pool import wait_until

KEY = bytes(range(32))
PARAMS = SamplingParams(n=2, max_tokens=4, seed=1)
VOCABULARY = 100
DEEP = b"[" * 200_000 + b"]" * 200_000


@contextlib.contextmanager
def registry(start_seconds=60.0, silence_seconds=20.0, **more):
    pool = GeneratorPool(512, 1024, start_seconds, vocab_size=VOCABULARY, **more)
    listener = Listener(KEY)
    with GeneratorRegistry(pool, listener, {"silence_seconds": silence_seconds}, capacity=4):
        for version in (2, 3):
            pool.load_weights({"version": version})
        yield pool, listener.address[1]


def told(change):
    """A generator's answer, of which `change` alters the first sample, or all parts where it returns some."""

    def answer(channel, message, version):
        parts = truth(message, version)
        parts = change(parts[0][2], parts) or parts
        channel.send({"kind": "tokens", "samples": parts})

    return answer


def put(**fields):
    return told(lambda sample, parts: sample.update(fields))


def sent(*messages):
    def answer(channel, message, version):
        for each in messages:
            channel.send(each)

    return answer


LIES = {
    "a log-probability is missing": (put(logprobs=[-1.0] * 3), "3 log-probabilities for 4 tokens"),
    "a route is missing": (put(routes=["AA=="] * 3), "3 routes for 4 tokens"),
    "a route that is none": (put(routes=["a b"] * 4), "route 'a b'"),
    "a version is missing": (put(versions=[3] * 3), "3 versions for 4 tokens"),
    "no versions": (put(versions=None), "no list of versions for 4 tokens"),
    "cuts that were not asked for": (put(truncated_logprobs=[-1.0] * 4), "4 truncated log-probabilities for 4 tokens"),
    "a token beyond the vocabulary": (put(token_ids=[1, 2, 3, 100]), "token 100 outside a vocabulary of 100"),
    "a negative token": (put(token_ids=[1, 2, 3, -1]), "token -1 outside a vocabulary"),
    "a token that is no whole number": (put(token_ids=[1, 2, 3, 1.5]), "1.5 among token ids"),
    "a token that is a truth value": (put(token_ids=[1, 2, 3, True]), "True among token ids"),
    "a huge token": (put(token_ids=[1, 2, 3, 10**40]), "token 1000"),
    "tokens that are a text": (put(token_ids="abcd"), "no list of token ids for no list of tokens"),
    "NaN": (put(logprobs=[-1.0, -1.0, -1.0, float("nan")]), "log-probability nan"),
    "minus infinity": (put(logprobs=[-1.0, -1.0, -1.0, float("-inf")]), "log-probability -inf"),
    "above what float32 holds": (put(logprobs=[-1.0, -1.0, -1.0, -1e300]), "log-probability -1e"),
    "above 0": (put(logprobs=[-1.0, -1.0, -1.0, 0.5]), "log-probability 0.5"),
    "a log-probability that is null": (put(logprobs=[None] * 4), "None among log-probabilities"),
    "a version of the future": (put(versions=[1003] * 4), "a token from weights version 1003"),
    "a version of the past": (put(versions=[2] * 4), "a token from weights version 2, but the request was sent"),
    "a version that never was": (
        put(versions=[-1] * 4),
        "a token from weights version -1, which the run has not published",
    ),
    "too many tokens": (
        put(token_ids=[7] * 9, logprobs=[-1.0] * 9, versions=[3] * 9),
        "9 tokens, but at most 4 were requested",
    ),
    "an end that there is not": (put(finish_reason="because"), "finish_reason 'because'"),
    "an end that only the run makes": (put(finish_reason="abort"), "finish_reason 'abort'"),
    "an end that is no text": (put(finish_reason=["stop"]), "finish_reason"),
    "an end before the last token": (
        put(token_ids=[7], logprobs=[-1.0], versions=[3]),
        "finish_reason 'length' after 1 of 4 tokens",
    ),
    "an end without a token": (
        put(token_ids=[], logprobs=[], versions=[], finish_reason="stop"),
        "finished sample without any token",
    ),
    "tokens after the end": (
        told(lambda sample, parts: [*parts, parts[0]]),
        "tokens for a sample that is already finished",
    ),
    "another field": (put(surprise=1), "a sample with missing or unknown fields"),
    "a sample that was not asked for": (told(lambda sample, parts: [[parts[0][0], 99, sample]]), "sample 99 of a"),
    "a sample from the end": (told(lambda sample, parts: [[parts[0][0], -1, sample]]), "sample -1 of a request for 2"),
    "a request that does not exist": (told(lambda sample, parts: [[99, 0, sample]]), "request 99, which does not"),
    "a request that is a list": (told(lambda sample, parts: [[[1], 0, sample]]), "which does not exist"),
    "samples that are none": (sent({"kind": "tokens", "samples": 5}), "not a message"),
    "a message that is a list": (sent([1, 2]), "not a message"),
    "another kind": (sent({"kind": "\x1b[31mred"}), r"a message of unknown kind '\x1b[31mred'"),
    "statistics that are a text": (sent({"kind": "alive", "statistics": "x"}), "statistics that are not a dictionary"),
    "statistics that are missing": (sent({"kind": "alive", "statistics": {"steps": 1}}), "prompt_tokens_computed None"),
    "statistics that are not finite": (sent({"kind": "alive", "statistics": {"steps": float("nan")}}), "steps nan"),
    "deep JSON": (lambda channel, *_: send_raw(channel, DEEP), "not JSON (RecursionError)"),
    "no UTF-8": (lambda channel, *_: send_raw(channel, b'"\xff"'), "not JSON (UnicodeDecodeError)"),
    "weights that were not given": (sent({"kind": "has_weights", "version": 1003}), "weights version 1003"),
    "older weights than it had": (sent({"kind": "has_weights", "version": 2}), "weights version 2"),
}


@pytest.mark.parametrize(("answer", "said"), LIES.values(), ids=LIES)
def test_what_cannot_be_so_ends_its_generator_by_name_and_the_run_goes_on(caplog, answer, said):
    with registry() as (pool, port):
        liar = Generator(port, KEY, answer, "liar")
        pool.wait_for_weights()
        request = pool.add([1, 2, 3], PARAMS)
        samples = pool.samples(request)
        wait_until(lambda: not pool.names)
        assert all(not sample.token_ids and not sample.finish_reason for sample in samples)
        (line,) = [line for line in caplog.messages if line.startswith("liar: ")]
        assert said in line and "gets no more requests" in line and line.isprintable()
        Generator(port, KEY, honest, "other")
        wait_until(lambda: all(sample.finish_reason for sample in samples))
        assert [sample.token_ids for sample in samples] == [[7] * 4] * 2
        assert liar.welcome["name"] == "liar" and "gets no more requests" in join(port, KEY, name="liar")[1]["problem"]
        assert pool.ready == ["other"] and {name.split("/")[1] for name in pool.metrics()} == {"other"}


def test_where_none_is_left_the_run_ends_and_says_why():
    with registry(start_seconds=0.2) as (pool, port):
        Generator(port, KEY, put(versions=[1003] * 4), "liar")
        with pytest.raises(RunStopped, match="the last one, liar: it sent invalid data .a token from weights vers"):
            pool.generate([[1]], PARAMS)


def test_whatever_fails_where_a_generator_is_heard_ends_it(monkeypatch):
    # A fault of our own, where nobody foresaw one.
    monkeypatch.setattr(GeneratorPool, "sampled", lambda *_: [][1])
    with registry() as (pool, port):
        Generator(port, KEY, honest, "one")
        pool.wait_for_weights()
        pool.add([1], PARAMS)
        wait_until(lambda: not pool.names)


def test_what_comes_late_of_a_request_that_was_given_up_is_no_lie():
    asked = []
    with registry() as (pool, port):
        one = Generator(port, KEY, lambda *message: asked.append(message), "one")
        pool.wait_for_weights()
        late = pool.add([1], PARAMS)
        wait_until(lambda: asked)
        pool.abort(late)
        request = pool.add([1], PARAMS)
        samples = pool.samples(request)
        wait_until(lambda: len(asked) == 2)
        for message in asked:
            honest(*message)
        wait_until(lambda: all(sample.finish_reason for sample in samples))
        assert pool.ready == ["one"] and one.channel


def test_our_own_engine_gives_no_log_probability_above_0():
    model = build_model(preset("qwen3:micro", 512), dtype="float32", seed=3)
    with torch.no_grad():
        model.norm.weight.mul_(300)  # so that one token has nearly all of the probability
    engine = Engine(model, EngineConfig(max_tokens_per_step=64, max_sequences=8, cache_tokens=2048))
    params = SamplingParams(n=8, max_tokens=40, seed=2, ignore_eos=True, top_p=0.9)
    found = [c for group in engine.generate([[1, 2], [5]], params) for c in group]
    values = [value for c in found for value in (*c.logprobs, *c.truncated_logprobs)]
    assert max(values) <= 0 and max(values) > -1e-6


# Who calls.


@pytest.mark.parametrize(
    "changes",
    [
        {"name": ["x"]}, {"name": {"a": 1}}, {"name": 5}, {"name": "\x1b[31mred\n"}, {"name": "../up"},
        {"name": "a" * 1_000_000}, {"host": "\x1b[31m\nrl: forged"}, {"host": 1}, {"tensor": "x"}, {"tensor": 10**9},
        {"pid": "x"}, {"pid": -1}, {"pid": 10**30}, {"place": 5}, {"generator": ["x"]},
        {"generator": "one", "rank": "\x1b"},
        {"lockstep": "\x1b[31m9"},
    ],
    ids=lambda changes: f"{changes}"[:40],
)  # fmt: skip
def test_who_introduces_itself_as_nobody_does_is_told_so_and_let_go(caplog, changes):
    with registry() as (pool, port):
        channel, answer = join(port, KEY, **changes)
        assert answer["problem"].isprintable() and len(answer["problem"]) < 400
        with pytest.raises(Closed):
            channel.receive(20)
        assert not pool.names
        assert all(line.isprintable() and len(line) < 400 for line in caplog.messages)


@pytest.mark.parametrize("said", [[1], "x", None, {}])
def test_who_says_no_hello_is_let_go(said):
    with registry() as (_, port):
        channel = call("127.0.0.1", port, KEY)
        channel.send(said)
        with pytest.raises(Closed):
            while True:
                channel.receive(20)


@pytest.mark.parametrize("kind", ["lost", "leaves", "refused", "incompatible"])
def test_what_a_generator_says_cannot_forge_a_log(caplog, kind):
    text = "\x1b[31mno\x07\nINFO: forged" + "x" * 10_000
    with registry() as (pool, port):
        message = {"kind": kind, "why": text, "problem": text, "id": 0}
        Generator(port, KEY, sent(message), "one")
        pool.wait_for_weights()
        with contextlib.suppress(UserError):
            pool.required = {"one"}
            request = pool.add([1], PARAMS)
            assert request == 0
            while pool.names:
                pool.step()
        errors = [*caplog.messages, str(pool._failure or ""), *pool._refused.values()]
    assert any(r"\x1b[31mno\x07\nINFO: forged" in line for line in errors)
    assert all(line.isprintable() and len(line) < 1200 for line in errors)


def test_one_line_keeps_what_can_be_read():
    assert one_line("größer – 漢字") == "größer – 漢字"
    assert one_line("a\tb\u202e\ud800\x9b") == r"a\tb\u202e\ud800\x9b"
    assert one_line("x" * 500, 10) == "x" * 10 + "…"


def test_callers_that_say_nothing_keep_nobody_out(monkeypatch):
    monkeypatch.setattr(wire, "MAX_UNGREETED", 4)
    monkeypatch.setattr(wire, "HANDSHAKE_SECONDS", 100.0)
    with registry() as (pool, port):
        silent = silent_callers(port, 20)
        _, welcome = join(port, KEY, name="one")
        assert welcome["name"] == "one"
        wait_until(lambda: pool.names == ["one"])
        # All but those that came last have been let go.
        for caller in silent[:10]:
            caller.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                while caller.recv(4096):
                    pass
        for caller in silent:
            caller.close()


def test_one_that_greets_byte_by_byte_has_no_more_time_than_others(monkeypatch):
    monkeypatch.setattr(wire, "HANDSHAKE_SECONDS", 0.5)
    listener = Listener(KEY)
    with socket.create_connection(("127.0.0.1", listener.address[1])) as slow:
        over = threading.Event()

        def drip():
            with contextlib.suppress(OSError):
                while not over.wait(0.05):
                    slow.send(b"x")

        threading.Thread(target=drip, daemon=True).start()
        with pytest.raises(Closed, match="did not complete the handshake within 0.5 s"):
            listener.greet(listener.accept())
        over.set()
    listener.close()


def test_without_file_descriptors_the_listener_waits_for_some():
    listener = Listener(KEY)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    caller = socket.create_connection(("127.0.0.1", listener.address[1]))
    accepted = []
    thread = threading.Thread(target=lambda: accepted.append(listener.accept()), daemon=True)
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(4)]
    try:
        # None is left: those below the limit are all in use.
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        thread.start()
        thread.join(0.5)
        assert thread.is_alive() and not accepted
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for file in taken:
            os.close(file)
    thread.join(20)
    assert accepted
    caller.close()
    listener.close()
    with pytest.raises(Closed):
        listener.accept()


def test_silence_in_the_middle_of_a_message_is_borne_as_long_as_between_two():
    with registry(silence_seconds=0.1) as (pool, port):
        busy, _ = join(port, KEY, name="busy")
        gone, _ = join(port, KEY, name="gone", place="elsewhere")
        for channel in (busy, gone):
            channel._write(wire.HEADER.pack(20, 0)[:5])
        wait_until(lambda: pool.names == ["busy"])
        threading.Event().wait(0.5)
        assert pool.names == ["busy"]  # the kernel says that it runs
        busy.close()
        wait_until(lambda: not pool.names)


def test_a_message_longer_than_any_is_not_waited_for():
    with registry() as (pool, port):
        for name, header in (("json", (2**31, 0)), ("beside", (2, 2**62))):
            channel, _ = join(port, KEY, name=name)
            channel._write(wire.HEADER.pack(*header) + b"{}")
            wait_until(lambda: not pool.names)


def test_of_nothing_compared_nothing_is_said():
    assert "same log-probability" not in parity_meaning(0, 0) + parity_meaning(0, 0, stale=True)
    assert parity_meaning(0, 0).startswith("Nothing was compared")
    assert "to the last bit" in parity_meaning(1, 0)


def test_a_hello_as_generators_say_it_is_taken():
    with registry() as (pool, port):
        channel, welcome = join(port, KEY)
        assert channel and welcome["name"] == "generator_0"
        wait_until(lambda: pool.names == ["generator_0"])
