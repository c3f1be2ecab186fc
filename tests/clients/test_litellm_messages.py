"""litellm in Anthropic's form, in an environment of its own, against server processes: it asks `/v1/responses`."""

import pytest

from tests.clients.replies import call

pytestmark = pytest.mark.slow


def test_messages_have_calls_whole_and_streamed(scripted, run):
    asks = call("weather", {"town": "Bergen"}, thought="I look.")
    scripted.say(asks, "Yes, it is.", asks)
    found = run("litellm_messages", "litellm_messages.py", scripted.url)
    assert found["input"] == found["streamed"] == {"town": "Bergen"} and found["answer"] == ["Yes, it is."]
    assert found["stop_reasons"] == ["tool_use", "end_turn"] and found["ends"] == ["tool_use"]
    prompts = scripted.prompts()
    assert ["It is raining." in prompt for prompt in prompts] == [False, True, False]
    assert all("Be short." in prompt for prompt in prompts)
