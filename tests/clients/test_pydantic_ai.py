"""pydantic-ai, in an environment of its own, against server processes."""

import json

import pytest

from tests.clients.replies import call

pytestmark = pytest.mark.slow


def test_agents_reach_an_output_of_their_type_in_each_way_and_stream(scripted, run):
    report = {"town": "Bergen", "wet": True}
    looks = call("weather", {"town": "Bergen"}, thought="I look.")
    final = call("final_result", report)
    scripted.say(looks, final, looks, json.dumps(report), looks, json.dumps(report), looks, "It rains in Bergen.")
    found = run("pydantic_ai", "pydantic_ai_agents.py", scripted.url, "scripted")
    assert [found[way] for way in ("ToolOutput", "NativeOutput", "PromptedOutput")] == [report] * 3
    assert found["refused"] == "ModelContextWindowExceededError"
    assert "".join(found["parts"]) == "It rains in Bergen." and len(found["parts"]) > 2 and found["usage"] > 20
    prompts = scripted.prompts()
    for shown in ("It is raining in Bergen.", "I look."):
        assert [shown in prompt for prompt in prompts] == [False, True] * 4
    assert all("Be brief." in prompt for prompt in prompts) and all("Look." in prompt for prompt in prompts[:6])


def test_output_of_random_weights_has_its_type(sampling, run):
    found = run("pydantic_ai", "pydantic_ai_agents.py", sampling, "sampled")
    for way in ("ToolOutput", "NativeOutput"):
        assert found[way]["town"] in ("Bergen", "Oslo") and isinstance(found[way]["wet"], bool)
