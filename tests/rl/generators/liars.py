"""Generators that know the run's key and say what they like."""

import os
import socket
import threading

from lockstep.observe.heartbeat import host as place
from lockstep.rl.generators.channel import HEADER, Closed, _signed, call
from lockstep.version import __version__


def hello(**changes):
    plain = {"name": "", "lockstep": __version__, "tensor": 1, "pid": os.getpid(), "place": place(), "host": "there"}
    return plain | changes


def join(port, key, **changes):
    """A connection that has said hello, and what it was told."""
    channel = call("127.0.0.1", port, key)
    channel.send(hello(**changes))
    return channel, channel.receive(10)[0]


def send_raw(channel, body):
    """A message that is signed as it should be, whatever is in it."""
    with channel._sending:
        header = HEADER.pack(len(body), 0)
        tag = _signed(channel._send_key, channel._sent.to_bytes(8, "little"), header, body)
        channel._sent += 1
        channel._write(header + body + tag)


def truth(message, version):
    """What a generator would answer to a request: of each sample all tokens that were asked for."""
    count = message["params"]["max_tokens"]
    return [
        [
            message["id"],
            index,
            {
                "token_ids": [7] * (count - len(begun["token_ids"])),
                "logprobs": [-1.0] * (count - len(begun["token_ids"])),
                "truncated_logprobs": [],
                "versions": [version] * (count - len(begun["token_ids"])),
                "routes": [],
                "finish_reason": "length",
            },
        ]
        for index, begun in enumerate(message["begun"])
    ]


class Generator:
    """Takes all weights and answers every request with what `answer(channel, message, version)` sends."""

    def __init__(self, port, key, answer, name="", has=lambda version: version):
        self.channel, self.welcome = join(port, key, name=name)
        self._answer, self._has = answer, has
        self._version = 0
        threading.Thread(target=self._live, daemon=True).start()

    def _live(self):
        try:
            while True:
                message, _ = self.channel.receive()
                if message["kind"] == "weights":
                    self._version = message["manifest"]["version"]
                    self.channel.send({"kind": "has_weights", "version": self._has(self._version)})
                elif message["kind"] == "request":
                    self._answer(self.channel, message, self._version)
                elif message["kind"] == "end":
                    return
        except Closed:
            pass


def honest(channel, message, version):
    channel.send({"kind": "tokens", "samples": truth(message, version)})


def silent_callers(port, count):
    """Connections that say nothing."""
    return [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(count)]
