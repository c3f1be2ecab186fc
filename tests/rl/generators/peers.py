"""Generators that do what a test says, in this process or over a connection, and what a test waits for."""

import contextlib
import os
import threading
from dataclasses import dataclass, field

from lockstep.observe.heartbeat import host as place
from lockstep.rl.generators.channel import Closed, Listener, call
from lockstep.rl.generators.pool import GeneratorPool
from lockstep.rl.generators.registry import GeneratorRegistry
from lockstep.rl.generators.remote import RemoteSample
from lockstep.version import __version__


def wait_until(condition):
    turn = threading.Event()
    for _ in range(5000):
        if condition():
            return
        turn.wait(0.002)
    raise AssertionError("it does not come")


def plain(groups):
    """What completions must not owe to their generator."""
    return [[(c.token_ids, c.logprobs, c.truncated_logprobs, c.finish_reason) for c in group] for group in groups]


@dataclass(eq=False)
class RecordedRemote:
    """A generator of a pool that does nothing but record what it is told."""

    name: str
    capacity: int = 4
    statistics: dict = field(default_factory=dict)
    requests: dict = field(default_factory=dict)
    """The tokens that were known of each sample, by the request's number."""
    calls: list = field(default_factory=list)

    def submit(self, request):
        self.requests[request.id] = [list(sample.token_ids) for sample in request.samples]
        self.calls.append(("submit", request.id))

    def abort(self, request_id):
        self.calls.append(("abort", request_id))

    def load_weights(self, manifest):
        self.calls.append(("weights", manifest["version"]))

    def close(self):
        self.calls.append(("close",))


def pool_of(*remotes, start_seconds=60.0, **options):
    """A pool whose generators have weights of version 1."""
    pool = GeneratorPool(512, 4096, start_seconds, **options)
    pool.load_weights({"version": 1})
    for remote in remotes:
        pool.join(remote)
        pool.has_weights(remote, 1)
    return pool


@contextlib.contextmanager
def registry_of(key, *, vocab_size=2**31, start_seconds=60.0, **welcome):
    """A pool that generators may join over a connection, and the port."""
    pool, listener = GeneratorPool(512, 1024, start_seconds, vocab_size=vocab_size), Listener(key)
    with GeneratorRegistry(pool, listener, {"silence_seconds": 20.0} | welcome, capacity=4):
        yield pool, listener.address[1]


def report(pool, remote, request, index, tokens, reason=None):
    logprobs = [-token / 10 for token in tokens]
    pool.sampled(remote, [(request, index, RemoteSample(list(tokens), logprobs, [], [1] * len(tokens), reason))])


def hello(**changes):
    values = {"name": "", "lockstep": __version__, "tensor": 1, "pid": os.getpid(), "place": place(), "host": "there"}
    return values | changes


def join(port, key, **changes):
    """A connection that has introduced itself, and the response."""
    channel = call("127.0.0.1", port, key)
    channel.send(hello(**changes))
    return channel, channel.receive(10)[0]


def samples_of(message, version):
    """A generator's response to a request: all tokens that are missing, of each sample."""
    samples = []
    for index, begun in enumerate(message["begun"]):
        count = message["params"]["max_tokens"] - len(begun["token_ids"])
        sample = {
            "token_ids": [7] * count,
            "logprobs": [-1.0] * count,
            "truncated_logprobs": [],
            "versions": [version] * count,
            "routes": [],
            "finish_reason": "length",
        }
        samples.append([message["id"], index, sample])
    return samples


def honest(channel, message, version):
    channel.send({"kind": "tokens", "samples": samples_of(message, version)})


class ConnectedGenerator:
    """Loads all weights, and responds to each request with what `answer(channel, message, version)` sends."""

    def __init__(self, port, key, answer=honest, name=""):
        self.channel, self.welcome = join(port, key, name=name)
        self._answer = answer
        threading.Thread(target=self._live, daemon=True).start()

    def _live(self):
        version = 0
        try:
            while (message := self.channel.receive()[0])["kind"] != "end":
                if message["kind"] == "weights":
                    version = message["manifest"]["version"]
                    self.channel.send({"kind": "has_weights", "version": version})
                elif message["kind"] == "request":
                    self._answer(self.channel, message, version)
        except Closed:
            pass
