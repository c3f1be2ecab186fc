"""litellm, in an environment of its own, against server processes."""

import pytest

from tests.clients.replies import call

pytestmark = pytest.mark.slow


def test_chats_under_both_names_have_calls_reasoning_and_content_of_a_type(scripted, run):
    asks = call("weather", {"town": "Bergen"}, thought="I look.")
    scripted.say(*[asks, "Yes, it is.", asks, '{"town": "Oslo", "wet": false}'] * 2)
    for found in run("litellm", "litellm_chats.py", scripted.url):
        assert found["arguments"] == found["streamed"] == {"town": "Bergen"}
        assert found["reasoning"] == found["streamed_reasoning"] == "I look." and found["answer"] == "Yes, it is."
        assert found["parsed"] == {"town": "Oslo", "wet": False} and found["usage"] > 20
        too_long, too_much = found["refused"]
        assert "prompt is too long" in too_long and "maximum context length is 32768 tokens" in too_much
    prompts = scripted.prompts()
    assert ["It is raining." in prompt for prompt in prompts] == [False, True, True, True] * 2
    assert ["I look." in prompt for prompt in prompts] == [False, True, True, True] * 2


def test_a_forced_call_of_random_weights_fits_its_schema(sampling, run):
    first, second = run("litellm", "litellm_forced.py", sampling)
    assert first == second and first["town"] in ("Bergen", "Oslo") and 1 <= first["days"] <= 9
