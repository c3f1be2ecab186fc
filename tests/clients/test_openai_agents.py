"""openai-agents, in an environment of its own, against server processes: it asks `/v1/responses`."""

import pytest

from tests.clients.replies import call

pytestmark = pytest.mark.slow


def test_agents_call_tools_and_continue_by_items_and_by_stored_responses(scripted, run):
    asks = call("weather", {"town": "Bergen", "days": 1}, thought="I look.")
    typed = call("weather", {"town": "Bergen", "days": 2}), '{"town": "Bergen", "wet": true}'
    scripted.say(asks, "Yes.", "Quite.", "Indeed.", asks, "Yes.", *typed)
    found = run("openai_agents", "agents_responses.py", scripted.url)
    assert found["asked"] == [["Bergen", 1], ["Bergen", 1], ["Bergen", 2]]
    assert found["answers"] == ["Yes.", "Quite.", "Indeed.", "Yes."] and found["tokens"] > 20
    assert found["typed"] == {"town": "Bergen", "wet": True}
    assert found["events"].count("response.completed") == 2
    assert {"response.reasoning_text.delta", "response.function_call_arguments.delta"} <= set(found["events"])
    prompts = scripted.prompts()
    assert ["It is raining." in prompt for prompt in prompts] == [False, *[True] * 3, False, True, False, True]
    # Sent back as items, and stored here: the same conversation.
    assert prompts[2] == prompts[3] and "Sure?" in prompts[2] and all("Be short." in prompt for prompt in prompts)
