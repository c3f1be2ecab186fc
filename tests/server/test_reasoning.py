"""Reasoning apart from content in the server's answers: the official client, and the route as it is."""

import pytest

from lockstep.data import StreamDecoder, load_tokenizer
from lockstep.data.replies import PLAIN, ReplyReader
from lockstep.generate.server.text import GrowingText, StopString
from tests.rl.conversations.families import write_family
from tests.server.conftest import running_server
from tests.server.scripted import SAID, THOUGHT, save_scripted, save_thinking

ASK = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def thinking(tmp_path_factory, bpe_tokenizer):
    """A server of a model that answers everything with the same thought and words, in Qwen3's form."""
    folder = tmp_path_factory.mktemp("thinking") / "qwen3"
    script = save_thinking(folder, bpe_tokenizer)
    with running_server(folder, model_name="thinking", dtype="float32") as running:
        running.script = script
        yield running


def ask(server, messages=ASK, **body):
    answer = server.chat(messages, temperature=0, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(server, **options):
    """(chunks, content, reasoning) of the answer to ASK, as the official client reads it."""
    with server.openai() as client:
        asked = dict(model=server.service.model_name, messages=ASK, temperature=0, stream=True)
        chunks = list(client.chat.completions.create(**asked, **options))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    return chunks, [delta.content or "" for delta in deltas], thoughts


def test_a_chats_answer_has_its_reasoning_apart_and_a_completion_is_the_raw_text(thinking):
    answer = ask(thinking, return_token_ids=True, logprobs=True)
    (choice,) = answer["choices"]
    message = {"role": "assistant", "content": SAID, "reasoning_content": THOUGHT, "refusal": None}
    assert choice["message"] == message and choice["finish_reason"] == "stop"
    # Tokens, log-probabilities and usage are of everything that was sampled.
    assert choice["token_ids"] == thinking.script and len(choice["logprobs"]["content"]) == len(thinking.script)
    assert answer["usage"]["completion_tokens"] == len(thinking.script)
    raw = thinking.complete(prompt="hi\n", temperature=0, max_tokens=40).json()["choices"][0]["text"]
    assert raw == f"<think>{THOUGHT}</think> {SAID}"


def test_a_stream_has_the_reasoning_in_deltas_of_its_own(thinking):
    chunks, contents, thoughts = streamed(thinking)
    assert "".join(thoughts) == THOUGHT and len(list(filter(None, thoughts))) > 1 and "".join(contents) == SAID
    assert not any(thought and content for thought, content in zip(thoughts, contents))
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant", *[None] * (len(chunks) - 1)]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_lone_end_of_reasoning_is_read_in_a_whole_answer_and_streamed_as_it_comes(thinking, say):
    said = ("a", "</think>", "b")
    say(thinking, said)
    (choice,) = ask(thinking, max_tokens=3)["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("b", "a")
    say(thinking, said)
    (choice,) = ask(thinking, max_tokens=3, stop=["b"])["choices"]
    assert choice["message"]["content"] == "a</think>" and choice["finish_reason"] == "stop"
    say(thinking, said)
    assert "".join(streamed(thinking, max_tokens=3)[1]) == "a</think>b"


def test_an_answer_that_is_cut_within_its_reasoning_has_no_content(thinking):
    (choice,) = ask(thinking, max_tokens=2)["choices"]
    assert choice["message"]["content"] == "" and choice["finish_reason"] == "length"
    assert THOUGHT.startswith(choice["message"]["reasoning_content"]) and choice["message"]["reasoning_content"]


def test_a_stop_string_ends_the_content_and_none_of_it_is_shown(thinking):
    (choice,) = ask(thinking, stop=["w:4"])["choices"]
    assert choice["message"]["content"] == "no" and choice["message"]["reasoning_content"] == THOUGHT
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_that_a_client_sends_back_reaches_the_template_under_either_name(thinking, name):
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = {"role": "assistant", "content": SAID}
    template, tokenizer = thinking.service.template, thinking.service.tokenizer
    # Qwen3's shows it within a turn of tools, but not before the user speaks again.
    for role, shown in (("tool", 1), ("user", 0)):
        called = {"tool_calls": [call]} if role == "tool" else {}
        messages = [*ASK, answer | called | {name: THOUGHT}, {"role": role, "content": "go on"}]
        prompt = ask(thinking, messages, max_tokens=1, return_token_ids=True)["prompt_token_ids"]
        if called:
            called = {"tool_calls": [call | {"function": {"name": "f", "arguments": {}}}]}
        written = [*ASK, answer | called | {"reasoning_content": THOUGHT}, messages[-1]]
        assert prompt == tokenizer.encode(template.render(written))
        assert tokenizer.decode(prompt).count(THOUGHT) == shown
    refused = thinking.chat([{"role": "user", "content": "hi", name: "x"}])
    assert refused.status_code == 400 and "only the assistant's messages have reasoning" in refused.text


@pytest.fixture(scope="module")
def channelled(tmp_path_factory, bpe_tokenizer):
    folder = tmp_path_factory.mktemp("channelled") / "gptoss"
    write_family(folder, "gptoss", bpe_tokenizer)
    tokenizer = load_tokenizer(folder)
    save_scripted(folder, tokenizer, tokenizer.encode("ab"), [tokenizer.eos_id])
    with running_server(folder, model_name="channelled", dtype="float32") as running:
        yield running


def test_no_channels_name_is_in_an_answer_streamed_or_not(channelled, say):
    said = "<|channel|>analysis<|message|>hmm<|end|><|start|>assistant<|channel|>final<|message|>yo<|return|>"
    script = say(channelled, [said])
    (choice,) = ask(channelled, max_tokens=len(script), return_token_ids=True)["choices"]
    assert choice["token_ids"] == script
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("yo", "hmm")
    say(channelled, [said])
    _, contents, thoughts = streamed(channelled, max_tokens=len(script))
    assert ("".join(contents), "".join(thoughts)) == ("yo", "hmm")


def grown(tokenizer, said, *stop, **options):
    """(content, reasoning, whether a stop string was found) of a text as it grows."""
    tokens = tokenizer.encode(said)
    decoder = StreamDecoder(tokenizer)
    reader = ReplyReader(options["form"], decoder) if options else None
    text = GrowingText(decoder, [StopString(one) for one in stop], [tokenizer.eos_id], reader)
    content, reasoning = "", ""
    for number, token in enumerate(tokens):
        content += text.push(token, last=number == len(tokens) - 1)
        reasoning += text.reasoning
        if text.stopped:
            break
    return content, reasoning, text.stopped


@pytest.mark.parametrize(
    ("stop", "content", "reasoning"),
    [
        ((), "yo, man", "hmm\nhm"),
        (("o,",), "y", "hmm\nhm"),
        (("analysis", "final", "assistant", "hmyo"), "yo, man", "hmm\nhm"),
        (("mm",), "", "h"),
        (("man",), "yo, ", "hmm\nhm"),
        (("many",), "yo, man", "hmm\nhm"),
    ],
)
def test_stop_strings_hold_in_what_is_shown_and_not_in_channels_names(channelled, stop, content, reasoning):
    tokenizer = channelled.service.tokenizer
    analysis = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
    said = analysis.format("hmm") + analysis.format("hm") + "<|channel|>final<|message|>yo, man<|return|>"
    assert grown(tokenizer, said, *stop) == (content, reasoning, content != "yo, man")
    raw = "analysishmmassistantanalysishmassistantfinalyo, man"
    assert grown(tokenizer, said, form=PLAIN) == (raw, "", False)
