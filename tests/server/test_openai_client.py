"""The official client against a real server: completions and chat, streamed and not."""

import re
import shutil

import httpx
import openai
import pytest

from lockstep import SamplingParams, load_model
from lockstep.generate import Engine
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


def test_a_completion_is_the_engines_own(client, chat_folder, bpe_tokenizer):
    answer = client.completions.create(model="small", prompt=PROMPT, max_tokens=12, seed=3, temperature=0.8, n=2)
    prompt = bpe_tokenizer.encode(PROMPT)
    params = SamplingParams(max_tokens=12, seed=3, temperature=0.8, n=2)
    expected = Engine(load_model(chat_folder)).generate([prompt], params)[0]
    assert [c.text for c in answer.choices] == [bpe_tokenizer.decode(c.token_ids) for c in expected]
    assert [c.finish_reason for c in answer.choices] == [c.finish_reason for c in expected]
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == sum(len(c.token_ids) for c in expected)


def test_a_streamed_completion_has_the_text_of_the_whole_one(client):
    options = dict(model="small", prompt=[PROMPT, "import "], max_tokens=20, seed=1, n=2)
    whole = client.completions.create(**options)
    texts, reasons, usage = {}, {}, None
    for chunk in client.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            reasons[choice.index] = choice.finish_reason
    assert [texts[i] for i in range(4)] == [c.text for c in whole.choices]
    assert [reasons[i] for i in range(4)] == [c.finish_reason for c in whole.choices]
    assert usage == whole.usage


def test_chat_streamed_and_not(client):
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
    assert text(temperature=0) == text(temperature=0, seed=9) == text(extra_body={"top_k": 1})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("echo", True),
        ("suffix", "end"),
        ("best_of", 3),
        ("frequency_penalty", 0.5),
        ("presence_penalty", -1),
        ("logit_bias", {"5": 1}),
    ],
)
def test_what_would_change_the_answer_and_is_not_supported_is_refused_by_name(client, field, value):
    with pytest.raises(openai.BadRequestError, match=field) as caught:
        client.completions.create(model="small", prompt="x", **{field: value})
    assert caught.value.param == field


def test_tools_are_refused_and_a_misspelt_field_gets_a_hint(client):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(openai.BadRequestError, match="tools is not supported"):
        client.chat.completions.create(model="small", messages=[{"role": "user", "content": "x"}], tools=[tool])
    with pytest.raises(openai.BadRequestError, match='Did you mean "temperature"'):
        client.completions.create(model="small", prompt="x", extra_body={"temperatur": 0.5})


TEXT = "must be a string, or a list of parts of type text"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, f"messages.0.content {TEXT}"),
        ({"role": "user", "content": 1}, f"messages.0.content {TEXT}"),
        ({"role": "user"}, f"messages.0.content {TEXT}"),
        ({"role": "user", "content": None}, f"messages.0.content {TEXT}"),
        ({"role": "assistant", "content": "x", "weight": 0}, "messages.0.weight is not supported here; remove it"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages.0.tool_calls is not supported here; remove it"),
        ({"role": "robot", "content": "x"}, "messages.0.role: Input should be 'system', 'developer'"),
        ("x", "messages.0: Input should be"),
        (
            {"role": "user", "content": "x", "nane": "ann"},
            'messages.0.nane is not supported here. Did you mean "name"?',
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "x", "texts": ["y"]}]},
            "messages.0.content.0.texts is not supported here; remove it",
        ),
        (
            {"role": "user", "content": None, "contnt": "x"},
            'messages.0.contnt is not supported here. Did you mean "content"?',
        ),
    ],
    ids=str,
)
def test_what_is_wrong_in_a_message_is_said_in_a_clients_words(client, message, said):
    with pytest.raises(openai.BadRequestError, match=re.escape(said)):
        client.chat.completions.create(model="small", messages=[message])


@pytest.mark.parametrize("name", ["reasoning_effort", "chat_template_kwargs", "guided_json"])
def test_a_field_of_openai_or_vllm_is_called_unsupported_not_unknown(client, name):
    with pytest.raises(openai.BadRequestError, match=f"{name} is not supported here; remove it") as caught:
        client.completions.create(model="small", prompt="x", extra_body={name: {"a": 1}})
    assert caught.value.code == "unsupported_parameter" and caught.value.param == name


@pytest.mark.parametrize("name", ["max_new_tokens", "max_tokns", "stream_option", "stop_words", "prompts", "tool"])
@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_a_hint_names_only_fields_that_there_are(name, kind):
    asked = {"prompt": "x"} if kind is CompletionRequest else {"messages": [{"role": "user", "content": "x"}]}
    with pytest.raises(ApiError) as refused:
        kind.model_validate(asked | {name: "x"}).check_fields()
    assert set(re.findall('"(.*?)"', refused.value.message)) <= kind.model_fields.keys()
    with pytest.raises(ApiError, match="looks like one that is not supported here; remove it"):
        kind.model_validate(asked | {"frequency_penality": 1}).check_fields()
    assert name in ("stop_words", "prompts", "tool") or "Did you mean" in refused.value.message


def test_a_hint_names_no_field_that_is_given():
    asked = {"prompt": "x", "max_tokens": 3}
    for wrong, said in (
        ("max_tokns", "Remove it"),
        ("temperatur", 'Did you mean "temperature"?'),
        ("stream_option", 'Did you mean "stream_options"?'),
    ):
        asked["stream"] = True
        with pytest.raises(ApiError, match=re.escape(f"unknown field '{wrong}'. {said}")):
            CompletionRequest.model_validate(asked | {wrong: 1}).check_fields()


def test_a_required_field_that_is_missing_is_named_with_what_was_given_for_it(client):
    for asked, said in (
        ({"promt": "x"}, "prompt is missing; there is 'promt'"),
        ({"text": "x"}, "prompt is missing"),
        ({}, "prompt is missing"),
    ):
        answer = httpx.post(f"{client.base_url}completions", json=asked)
        error = answer.json()["error"]
        assert (answer.status_code, error["message"], error["param"]) == (400, said, "prompt")
    with pytest.raises(openai.BadRequestError, match=re.escape("messages.0.role is missing; there is 'rol'")):
        client.chat.completions.create(model="small", messages=[{"rol": "user", "content": "x"}])


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
        lengths = [
            client.chat.completions.create(**asked, extra_body=body).usage.prompt_tokens
            for body in ({}, {"chat_template_kwargs": {}}, {"chat_template_kwargs": {"enable_thinking": True}})
        ]
        short = client.chat.completions.create(
            **asked, extra_body={"chat_template_kwargs": {"enable_thinking": False}}
        ).usage.prompt_tokens
        assert len({*lengths}) == 1 and short > lengths[0]
        for name, said in (
            ("enable_thinkng", "takes no 'enable_thinkng'. Did you mean \"enable_thinking\"?"),
            ("messages", "takes no 'messages'. Remove it"),
            ("self", "takes no 'self'. Remove it"),
            ("eos_token", "takes no 'eos_token'. Remove it"),
            ("pad_token", "takes no 'pad_token'. Remove it"),
            ("generation_begins", "takes no 'generation_begins'. Remove it"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                client.chat.completions.create(**asked, extra_body={"chat_template_kwargs": {name: 1}})
            assert said in refused.value.body["message"] and refused.value.param == "chat_template_kwargs"
        with pytest.raises(openai.BadRequestError, match="has 1000023 characters, more than 65536") as refused:
            client.chat.completions.create(
                **asked, extra_body={"chat_template_kwargs": {"enable_thinking": {"unread": "漢" * 10**4}}}
            )
            values = {"enable_thinking": "x" * 10**6}
            client.chat.completions.create(**asked, extra_body={"chat_template_kwargs": values})
        assert refused.value.param == "chat_template_kwargs"


def test_a_tools_result_names_its_call():
    message = {"role": "tool", "content": "5", "tool_call_id": "call_1"}
    request = ChatRequest.model_validate({"messages": [message]})
    request.check_fields()
    assert request.messages[0].plain() == message


def test_an_option_of_a_stream_that_is_misspelt_or_not_supported_is_refused(client):
    for options, said in (
        ({"include_usge": True}, r'include_usge is not supported here\. Did you mean "include_usage"'),
        ({"continuous_usage_stats": True}, "continuous_usage_stats is not supported here; remove it"),
        ({"include_usage": True, "include_usag": True}, "include_usag is not supported here; remove it"),
        ({"index": 7}, "index is not supported here; remove it"),
    ):
        with pytest.raises(openai.BadRequestError, match=rf"stream_options\.{said}") as caught:
            client.completions.create(model="small", prompt="x", stream=True, stream_options=options)
        assert caught.value.param == "stream_options"
    usual = {"include_usage": True, "continuous_usage_stats": False}
    chunks = list(client.completions.create(model="small", prompt="x", stream=True, max_tokens=2, stream_options=usual))
    assert chunks[-1].usage.completion_tokens == 2


def test_a_chats_limit_is_named_as_the_client_did(client):
    messages = [{"role": "user", "content": "x"}]
    for name in ("max_tokens", "max_completion_tokens"):
        with pytest.raises(openai.BadRequestError, match=f"{name} 512 exceed the context .* lower {name}") as caught:
            client.chat.completions.create(model="small", messages=messages, **{name: 512})
        assert caught.value.param == name
    with pytest.raises(openai.BadRequestError, match="token 999999 at position 0 of prompt 1 is outside") as caught:
        client.completions.create(model="small", prompt=[[1], [999999]])
    assert caught.value.param == "prompt"


def test_a_prompt_and_max_tokens_beyond_the_context_have_openais_code(client):
    with pytest.raises(
        openai.BadRequestError, match=r"1 tokens and max_tokens 512 exceed the context of 512"
    ) as caught:
        client.completions.create(model="small", prompt=[1], max_tokens=512)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "max_tokens"


def test_fields_that_change_nothing_are_accepted(client):
    client.chat.completions.create(
        model="small",
        messages=[
            {"role": "user", "content": "x", "name": "ann"},
            {
                "role": "assistant",
                "content": "y",
                "refusal": None,
                "tool_calls": [],
                "reasoning_content": "",
                "id": "7",
            },
            {"role": "user", "content": [{"type": "text", "text": "z", "cache_control": {"type": "ephemeral"}}]},
        ],
        max_tokens=2,
        user="me",
        metadata={"a": "b"},
        store=False,
        presence_penalty=0,
        tools=[],
        response_format={"type": "text"},
    )
