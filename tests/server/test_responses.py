"""A long answer is JSON that is written in small parts, for each holds every other thread up until it is done."""

import json

import pytest

from lockstep.data import ByteTokenizer
from lockstep.generate.sampling_params import TokenEvent
from lockstep.generate.server import responses
from lockstep.generate.server.responses import Piece, Reply

TOKENS, TOP = 200, 20


@pytest.mark.parametrize("chat", [False, True])
def test_no_part_of_an_answer_that_is_written_at_once_grows_with_tokens_times_top_logprobs(monkeypatch, chat):
    top = [(token, -0.5 - token) for token in range(TOP)]
    events = [TokenEvent(0, 0, i % 256, -0.25, None, 0, top) for i in range(TOKENS)]
    reply = Reply("id", 1, "model", chat, [[1, 2]], ByteTokenizer(), TOP, True)
    longest, whole = 0, json.dumps

    def dumps(value):
        nonlocal longest
        longest = max(longest, len(whole(value)))
        return whole(value)

    monkeypatch.setattr(responses.json, "dumps", dumps)
    answer = reply.answer([Piece(0, 0, True, "text", events, list(range(TOKENS)), "length")], {"total_tokens": 3})
    assert longest < len(answer) / 10
    (choice,) = json.loads(answer)["choices"]
    said = choice["logprobs"]["content" if chat else "top_logprobs"]
    assert len(said) == TOKENS and len(said[50]["top_logprobs"] if chat else said[50]) >= TOP
