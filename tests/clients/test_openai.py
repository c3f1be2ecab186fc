"""openai-python, in an environment of its own, against server processes."""

import pytest

from tests.clients.replies import call

pytestmark = pytest.mark.slow


def test_chats_with_tools_streams_and_parsed_content(scripted, run):
    weather = {"town": "Bergen", "days": 2}
    asks = call("Weather", weather, thought="I look.")
    scripted.say(asks, "Yes, it is.", asks, '{"town": "Oslo", "days": 1}')
    found = run("openai", "openai_chats.py", scripted.url)
    assert found["call"] == "Weather" and found["arguments"] == found["streamed"] == weather
    assert found["reasoning"] == "I look." and found["answer"] == "Yes, it is."
    assert found["parsed"] == {"town": "Oslo", "days": 1}
    assert "tool_calls.function.arguments.delta" in found["events"]
    prompts = scripted.prompts()
    for shown in ("It is raining.", "I look."):
        assert [shown in prompt for prompt in prompts] == [False, True, True, True]


def test_forced_calls_and_content_of_random_weights_have_their_types(sampling, run):
    found = run("openai", "openai_forced.py", sampling)
    assert found["finish_reasons"] == ["tool_calls"] * 2 and found["call"]["town"] in ("Bergen", "Oslo")
    assert found["streamed"] == found["call"] and found["usage"] == found["tokens"] > 5
    assert isinstance(found["report"]["sure"], bool)
    refused = found["refused"]
    assert "other kinds of tools are not supported" in refused["custom tools"]
    assert "type must be text: other parts are not supported here" in refused["pictures"]
    named = {
        "sound": "audio",
        "web search": "web_search_options",
        "prediction": "prediction",
    }
    for name, field in named.items():
        assert f"{field} is not supported" in refused[name]
    assert "reasoning_effort: this model's chat template has no way to ask for 'low'" in refused["effort"]
