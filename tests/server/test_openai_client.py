"""The official client against a real server: completions and chat, streamed and not."""

import re
import shutil

import httpx
import openai
import pytest

from lockstep.generate.server.api_error import ApiError
from lockstep.generate.server.protocol import ChatRequest, CompletionRequest
from tests.server.conftest import running_server

PROMPT = "def main(arguments):\n    "


def test_models_lists_the_served_one_and_knows_no_other(client):
    assert [m.id for m in client.models.list()] == ["small"]
    assert client.models.retrieve("small").id == "small"
    with pytest.raises(openai.NotFoundError, match="'large' does not exist"):
        client.models.retrieve("large")
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="large", prompt="x")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"


def test_a_streamed_chat_has_the_text_and_log_probabilities_of_the_whole_one(client):
    options = dict(
        model="small",
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "argparse?"}]},
        ],
        max_completion_tokens=16,
        seed=5,
        logprobs=True,
        top_logprobs=3,
    )
    whole = client.chat.completions.create(**options)
    choice = whole.choices[0]
    assert choice.message.role == "assistant" and whole.usage.completion_tokens == len(choice.logprobs.content)
    entry = choice.logprobs.content[0]
    assert len(entry.top_logprobs) == 3 and entry.top_logprobs[0].logprob >= entry.logprob
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(c.choices[0].delta.role is None for c in chunks[1:])
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == choice.message.content
    assert [e for c in chunks for e in c.choices[0].logprobs.content] == choice.logprobs.content
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason


def test_a_chat_without_a_limit_ends_with_the_context(client, server):
    answer = client.chat.completions.create(
        model="small", messages=[{"role": "user", "content": "Hi"}], extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == server.service.context


@pytest.mark.parametrize("as_list", [False, True])
def test_text_ends_before_a_stop_string_of_which_a_stream_shows_no_part(client, as_list):
    free = dict(model="small", prompt=PROMPT, max_tokens=60, seed=11, extra_body={"ignore_eos": True})
    text = client.completions.create(**free).choices[0].text
    # Six characters from the middle on that are whole: which ones depends on the processor's arithmetic.
    pieces = (text[start : start + 6] for start in range(20, len(text) - 6))
    stop = next(piece for piece in pieces if "\N{REPLACEMENT CHARACTER}" not in piece)
    options = free | {"stop": ["never\x00there", stop] if as_list else stop}
    whole = client.completions.create(**options).choices[0]
    assert whole.text == text[: text.index(stop)] and whole.finish_reason == "stop"
    shown = ""
    for chunk in client.completions.create(**options, stream=True):
        shown += chunk.choices[0].text
        assert whole.text.startswith(shown)
    assert shown == whole.text


def test_logprobs_of_a_completion_have_openais_shape(client):
    answer = client.completions.create(model="small", prompt=PROMPT, max_tokens=8, seed=2, logprobs=2)
    got, text = answer.choices[0].logprobs, answer.choices[0].text
    assert len(got.tokens) == len(got.token_logprobs) == len(got.top_logprobs) == len(got.text_offset) == 8
    for token, logprob, top, offset in zip(got.tokens, got.token_logprobs, got.top_logprobs, got.text_offset):
        assert 2 <= len(top) <= 3 and logprob in top.values()
        # What a character that never ended leaves belongs to the token after it.
        assert token.startswith("token_id:") or text[offset:].lstrip("\N{REPLACEMENT CHARACTER}").startswith(token)
    assert client.completions.create(model="small", prompt="x", logprobs=0).choices[0].logprobs.top_logprobs is None


def test_the_same_seed_gives_the_same_text_and_temperature_0_the_likeliest(client):
    def text(**options):
        return client.completions.create(model="small", prompt=PROMPT, max_tokens=10, **options).choices[0].text

    assert text(seed=4) == text(seed=4) != text(seed=5)
    likeliest = text(temperature=0)
    assert likeliest == text(temperature=0, seed=9) != text(seed=4)
    for alone in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.999}):  # leaves nothing but the likeliest token
        assert text(seed=4, extra_body=alone) == likeliest


TEXT = "must be a string, or a list of parts of type text"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
ONE = [{"role": "user", "content": "x"}]


def _message(message):
    return {"messages": [message]}


REFUSED = [
    ({"prompt": "x", "suffix": "y"}, "suffix", "suffix is not supported here"),
    ({"prompt": "x", "length_penalty": 2}, "length_penalty", "length_penalty is not supported here"),
    (
        {"prompt": "x", "guided_json": {"a": 1}},
        "guided_json",
        "guided_json is not supported here; send structured_outputs",
    ),
    ({"prompt": "x", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "is not supported here; remove it"),
    ({"messages": ONE, "tools": [TOOL]}, "tools", "chat template does not show tools"),
    ({"prompt": "x", "temperatur": 0.5}, "temperatur", 'Did you mean "temperature"'),
    ({"promt": "x"}, "prompt", "prompt is missing; there is 'promt'"),
    ({}, "prompt", "prompt is missing"),
    *(
        (_message(message), "messages", said)
        for message, said in [
            (
                {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
                "messages.0.content.0.type must be text",
            ),
            ({"role": "user", "content": [3]}, "messages.0.content.0: Input should be an object"),
            ({"role": "user", "content": 3}, f"messages.0.content {TEXT}"),
            ({"role": "assistant", "tool_calls": 3}, "messages.0.tool_calls must be a list of up to 1024 calls"),
            (
                {"role": "assistant", "tool_calls": [{"id": "a", "type": "custom", "custom": {}}]},
                "messages.0.tool_calls.0.type must be function: other kinds of calls are not supported here",
            ),
            ({"role": "user"}, f"messages.0.content {TEXT}"),
            ({"role": "assistant", "content": "x", "weight": 0}, "messages.0.weight is not supported here; remove it"),
            ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages.0.tool_calls.0.function is missing"),
            ("x", "messages.0: Input should be"),
            (
                {"role": "user", "content": [{"type": "text", "text": "x", "texts": ["y"]}]},
                "messages.0.content.0.texts is not supported here; remove it",
            ),
        ]
    ),
    (
        {"prompt": "x", "stream": True, "stream_options": {"include_usge": True}},
        *("stream_options", 'stream_options.include_usge is not supported here. Did you mean "include_usage"'),
    ),
    (
        {"prompt": "x", "stream": True, "stream_options": {"continuous_usage_stats": True}},
        *("stream_options", "stream_options.continuous_usage_stats is not supported here; remove it"),
    ),
    # A limit has the name that the client gave it.
    *(
        ({"messages": ONE, name: 512}, name, f"length is 512 tokens, but a prompt has 18 and {name} is 512; shorten")
        for name in ("max_tokens", "max_completion_tokens")
    ),
    (
        {"prompt": [1], "max_tokens": 512},
        "max_tokens",
        "length is 512 tokens, but a prompt has 1 and max_tokens is 512; shorten",
    ),
    ({"prompt": [[1], [999999]]}, "prompt", "token 999999 at position 0 of prompt 1 is outside"),
]


@pytest.mark.parametrize(("body", "param", "said"), REFUSED, ids=str)
def test_what_is_wrong_or_not_supported_is_refused_by_name_and_in_a_clients_words(client, body, param, said):
    answer = httpx.post(f"{client.base_url}{'chat/' if 'messages' in body else ''}completions", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and said in error["message"] and error["param"] == param
    if "length is 512" in said:
        assert error["code"] == "context_length_exceeded"
    elif said.startswith(f"{param} is not supported"):
        assert error["code"] == "unsupported_parameter"


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_a_hint_names_only_fields_that_there_are_and_that_are_not_given(kind):
    asked = {"prompt": "x"} if kind is CompletionRequest else {"messages": ONE}
    given = {"max_tokens": 3, "stream": True}
    for wrong, more, said in (
        ("max_new_tokens", {}, "Did you mean"),
        ("stop_words", {}, "unknown field 'stop_words'."),
        ("max_tokns", given, "unknown field 'max_tokns'. Remove it"),
        ("stream_option", given, "unknown field 'stream_option'. Did you mean \"stream_options\"?"),
        ("skip_special_tokns", given, "looks like one that is not supported here; remove it"),
    ):
        with pytest.raises(ApiError, match=re.escape(said)) as refused:
            kind.model_validate(asked | more | {wrong: 1}).check_fields()
        assert set(re.findall('"(.*?)"', refused.value.message)) <= kind.model_fields.keys()


def test_values_for_the_chat_template_reach_it_and_others_are_refused(tmp_path, chat_folder):
    folder = tmp_path / "model"
    shutil.copytree(chat_folder, folder)
    thinking = (
        "{% generation %}{{ eos_token }}{{ pad_token }}{% endgeneration %}"
        "{% if enable_thinking is defined and not enable_thinking %}no thoughts{% endif %}"
    )
    with (folder / "chat_template.jinja").open("a") as file:
        file.write(thinking)
    asked = {"model": "model", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    with running_server(folder) as running, running.openai() as client:

        def length(values=None):
            body = {} if values is None else {"chat_template_kwargs": values}
            return client.chat.completions.create(**asked, extra_body=body).usage.prompt_tokens

        assert length({"enable_thinking": False}) > length() == length({}) == length({"enable_thinking": True})
        for name, said in (
            ("enable_thinkng", "takes no 'enable_thinkng'. Did you mean \"enable_thinking\"?"),
            ("messages", "takes no 'messages'. Remove it"),
            ("self", "takes no 'self'. Remove it"),
            ("eos_token", "takes no 'eos_token'. Remove it"),
            ("generation_begins", "takes no 'generation_begins'. Remove it"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                length({name: 1})
            assert said in refused.value.body["message"] and refused.value.param == "chat_template_kwargs"
        with pytest.raises(openai.BadRequestError, match="has 1000023 characters, more than 65536") as refused:
            length({"enable_thinking": "x" * 10**6})
        assert refused.value.param == "chat_template_kwargs"


def test_a_tools_result_names_its_call():
    message = {"role": "tool", "content": "5", "tool_call_id": "call_1"}
    request = ChatRequest.model_validate({"messages": [message]})
    request.check_fields()
    assert request.messages[0].plain() == message


def test_fields_that_change_nothing_are_accepted(client):
    client.chat.completions.create(
        model="small",
        messages=[
            {"role": "user", "content": "x", "name": "ann"},
            {"role": "assistant", "content": "y", "refusal": None, "tool_calls": [], "id": "7"},
            {"role": "user", "content": [{"type": "text", "text": "z", "cache_control": {"type": "ephemeral"}}]},
        ],
        max_tokens=2,
        user="me",
        extra_body={"prompt_cache_options": {"mode": "explicit"}},
        metadata={"a": "b"},
        store=False,
        presence_penalty=0,
        verbosity="medium",
        tools=[],
        response_format={"type": "text"},
    )
    usual = {"include_usage": True, "continuous_usage_stats": False}
    chunks = list(client.completions.create(model="small", prompt="x", stream=True, max_tokens=2, stream_options=usual))
    assert chunks[-1].usage.completion_tokens == 2
