"""inspect-ai, in an environment of its own, against a server process."""

import json

import pytest

from tests.clients.replies import call

pytestmark = pytest.mark.slow


def test_evaluations_score_what_the_model_says(scripted, run):
    looks = [call("weather", {"town": town}, thought="I look.") for town in ("Bergen", "Oslo")]
    ends = [call("submit", {"answer": answer}) for answer in ("Yes, in Bergen.", "No.")]
    written = json.dumps({"town": "Bergen", "wet": True})
    tools = looks[0], "It rains in Bergen.", looks[1], "I know nothing."
    agent = looks[0], ends[0], looks[1], ends[1]
    scripted.say(*[*tools, *agent, written, "It rains in Bergen."] * 2)
    found = run("inspect_ai", "inspect_evals.py", scripted.url)
    prompts = scripted.prompts()
    assert ["I look." in prompt for prompt in prompts] == [*[False, True] * 4, False, False] * 2
    for way in ("whole", "streamed"):
        assert found[f"tools {way}"]["answers"] == ["It rains in Bergen.", "I know nothing."]
        assert found[f"tools {way}"]["accuracy"] == found[f"agent {way}"]["accuracy"] == 0.5
        assert found[f"tools {way}"]["reasoned"] == found[f"agent {way}"]["reasoned"] == [["I look."]] * 2
        assert found[f"schema {way}"]["answers"] == [written]
        assert found[f"too long {way}"] == "model_length"
        assert found[f"logprobs {way}"]["logprobs"][0] > 5
