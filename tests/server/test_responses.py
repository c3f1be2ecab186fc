"""`/v1/responses`, by the official client and as it is: items, streams, stored responses and refusals."""

import json

import pytest

from tests.server.conftest import running_server
from tests.server.scripted import save_thinking


@pytest.fixture(scope="module")
def thinking(tmp_path_factory, bpe_tokenizer):
    """A server of a model that answers everything with the same thought and words, in Qwen3's form."""
    folder = tmp_path_factory.mktemp("thinking") / "qwen3"
    script = save_thinking(folder, bpe_tokenizer)
    with running_server(folder, model_name="thinking", dtype="float32") as running:
        running.script = script
        yield running


def post(server, **body):
    with server.http() as client:
        return client.post("/v1/responses", json={"input": "hi", **body})


def test_x(thinking):
    answer = post(thinking, temperature=0, include=["message.output_text.logprobs"], top_logprobs=1)
    assert answer.status_code == 200, answer.text
    print(json.dumps(answer.json(), indent=1)[:6000])
    with thinking.http() as client:
        print(client.post("/v1/responses", json={"input": "hi", "temperature": 0, "stream": True}).text)
    assert 0
