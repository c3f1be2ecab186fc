"""langchain-openai and LangGraph, in an environment of their own, against server processes."""

import json

import pytest

from tests.clients.replies import call

pytestmark = pytest.mark.slow


def test_tools_structured_output_and_the_prebuilt_agent_work_whole_and_streamed(scripted, run):
    report = {"town": "Bergen", "wet": True}
    looks, written = call("weather", {"town": "Bergen"}, thought="I look."), json.dumps(report)
    formatted = looks, "Yes, it is.", written
    scripted.say(looks, looks, looks, "Yes, it is.", *formatted, written, call("Report", report), written)
    found = run("langchain", "langchain_chats.py", scripted.url, "scripted")
    assert found["call"] == found["streamed"] == {"town": "Bergen"} and found["chunks"] > 10
    assert found["messages"] == ["Is it raining in Bergen?", "", "It is raining in Bergen.", "Yes, it is."]
    assert "prompt is too long" in found["refused"]
    for way in ("formatted", "json_schema", "function_calling", "json_mode"):
        assert found[way] == report
    seen = ["It is raining in Bergen." in prompt for prompt in scripted.prompts()]
    assert seen == [False, False, False, True, False, True, True, False, False, False]


def test_structured_output_of_random_weights_has_its_type(sampling, run):
    found = run("langchain", "langchain_chats.py", sampling, "sampled")
    for way in ("json_schema", "function_calling"):
        assert found[way]["town"] in ("Bergen", "Oslo") and isinstance(found[way]["wet"], bool)
