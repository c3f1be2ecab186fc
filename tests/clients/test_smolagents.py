"""smolagents, in an environment of its own, against server processes."""

import json

import pytest

from tests.clients.replies import call

pytestmark = pytest.mark.slow


def test_agents_that_call_tools_or_write_code_reach_their_answer(scripted, run):
    steps = call("weather", {"town": "Bergen"}, thought="I look."), call("final_answer", {"answer": "Yes."})
    code = {"thought": "I look.", "code": 'final_answer(weather("Bergen").upper())'}
    scripted.say(*steps, *steps, json.dumps(code))
    found = run("smolagents", "smolagents_agents.py", scripted.url)
    for way in ("whole", "streamed"):
        assert found[way] == "Yes." and found[f"{way}_observations"][0] == "It is raining in Bergen."
    assert found["coder"] == "IT IS RAINING IN BERGEN."
    prompts = scripted.prompts()
    assert ["It is raining in Bergen." in prompt for prompt in prompts] == [False, True, False, True, False]
