"""Penalties, biases, echo, log-probabilities of prompts, best_of and truncation, over both routes."""

import json
import math

import httpx
import pytest
import torch

from lockstep import load_model, score
from lockstep.generate import Engine, SamplingParams
from lockstep.generate.grammars import Matcher
from lockstep.generate.server import prompt_logprobs
from tests.server.conftest import running_server

PROMPT = [11, 12, 13, 40, 41]


def _engine(chat_folder, server):
    return Engine(load_model(chat_folder), tokenizer=server.service.tokenizer)


def _scores(chat_folder, tokens):
    return score(load_model(chat_folder), [tokens])[0].tolist()


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_adjusted_samples_are_those_of_an_engine_here(server, chat_folder, route):
    fields = {
        "frequency_penalty": 1.5, "presence_penalty": -0.5, "repetition_penalty": 1.2, "min_tokens": 3,
        "logit_bias": {"17": 4, "18": -100.0}, "max_tokens": 12, "n": 2, "seed": 5, "temperature": 0.9,
    }  # fmt: skip
    chat = route != "completions"
    prompt = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": PROMPT}
    with server.http() as http:
        logprobs = {"logprobs": True if chat else 0}
        answer = http.post(f"/v1/{route}", json=prompt | fields | logprobs | {"return_token_ids": True}).json()
    tokens = answer["prompt_token_ids"] if chat else PROMPT
    bias = tuple((int(token), float(value)) for token, value in fields.pop("logit_bias").items())
    (group,) = _engine(chat_folder, server).generate([tokens], SamplingParams(**fields, logit_bias=bias))
    for choice, completion in zip(answer["choices"], group, strict=True):
        assert choice["token_ids"] == completion.token_ids
        assert choice["truncated_logprobs"] == completion.truncated_logprobs != completion.logprobs


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("given", ["text", "tokens"])
def test_an_echo_has_the_prompt_with_its_exact_log_probabilities(server, chat_folder, given, stream):
    tokenizer = server.service.tokenizer
    text = "def main(é):"
    tokens = tokenizer.encode(text)
    body = dict(prompt=text if given == "text" else tokens, echo=True, logprobs=2, max_tokens=4, seed=3, n=2)
    plain = {name: value for name, value in body.items() if name != "echo"}
    without = server.complete(**plain).json()["choices"]
    if stream:
        choices = [
            {"text": "", "logprobs": {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}}
            for _ in range(2)
        ]
        for chunk in server.stream(**body):
            (choice,) = chunk["choices"]
            choices[choice["index"]]["text"] += choice["text"]
            for name, values in choices[choice["index"]]["logprobs"].items():
                values += choice["logprobs"][name]
    else:
        choices = server.complete(**body).json()["choices"]
    expected = _scores(chat_folder, tokens)
    for choice, other in zip(choices, without, strict=True):
        assert choice["text"] == text + other["text"]
        lists, sampled = choice["logprobs"], other["logprobs"]
        assert lists["token_logprobs"] == [None, *expected, *sampled["token_logprobs"]]
        assert lists["top_logprobs"][0] is None and lists["top_logprobs"][len(tokens) :] == sampled["top_logprobs"]
        assert all(value in top.values() for value, top in zip(expected, lists["top_logprobs"][1:]))
        assert all(len(top) in (2, 3) for top in lists["top_logprobs"][1:])
        assert lists["tokens"][len(tokens) :] == sampled["tokens"] and len(lists["tokens"]) == len(tokens) + 4
        offsets = lists["text_offset"]
        assert offsets[len(tokens) :] == [len(text) + offset for offset in sampled["text_offset"]]
        for name, offset in zip(lists["tokens"], offsets[: len(tokens)]):
            assert name.startswith("token_id:") or text[offset:].startswith(name)


def test_echo_without_new_tokens_scores_a_text(server, chat_folder):
    tokenizer = server.service.tokenizer
    texts = ["return None", "class Parser:"]
    answer = server.complete(prompt=texts, echo=True, logprobs=0, max_tokens=0, return_token_ids=True).json()
    for text, choice in zip(texts, answer["choices"], strict=True):
        tokens = tokenizer.encode(text)
        assert choice["text"] == text and choice["finish_reason"] == "length" and choice["token_ids"] == []
        assert choice["logprobs"]["token_logprobs"] == [None, *_scores(chat_folder, tokens)]
        assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["text_offset"]) == len(tokens)
        assert choice["prompt_token_ids"] == tokens
    assert answer["usage"]["completion_tokens"] == 0
    (chunk, counted) = server.stream(prompt=texts[0], echo=True, max_tokens=0, stream_options={"include_usage": True})
    assert chunk["choices"][0]["text"] == texts[0] and counted["usage"]["completion_tokens"] == 0


def test_the_token_that_is_computed_but_not_shown_does_not_end_a_text(server):
    end = str(server.service.tokenizer.eos_id)
    body = {"prompt": "return", "echo": True, "max_tokens": 0, "logit_bias": {end: 100}}
    (choice,) = server.complete(**body).json()["choices"]
    (chunk,) = server.stream(**body)
    assert (choice["finish_reason"], chunk["choices"][0]["finish_reason"]) == ("length", "length")
    assert server.complete(**{**body, "max_tokens": 1}).json()["choices"][0]["finish_reason"] == "stop"


def test_prompt_logprobs_have_vllms_form_on_both_routes(server, chat_folder):
    chat = server.chat("hello", max_tokens=1, prompt_logprobs=1, return_token_ids=True).json()
    completion = server.complete(prompt=PROMPT, max_tokens=1, prompt_logprobs=3, temperature=0.5).json()
    for tokens, found, top in (
        (chat["prompt_token_ids"], chat["prompt_logprobs"], 1),
        (PROMPT, completion["choices"][0]["prompt_logprobs"], 3),
    ):
        assert found[0] is None and len(found) == len(tokens)
        for token, expected, entries in zip(tokens[1:], _scores(chat_folder, tokens), found[1:]):
            own = entries[str(token)]
            assert own["logprob"] == expected and own.keys() == {"logprob", "rank", "decoded_token"}
            assert len(entries) == top + (own["rank"] > top)
            assert sorted(entry["rank"] for entry in entries.values())[:top] == list(range(1, top + 1))
    assert "prompt_logprobs" not in server.complete(prompt=PROMPT, max_tokens=1).json()["choices"][0]
    both = server.complete(prompt=PROMPT, max_tokens=1, prompt_logprobs=2, echo=True, logprobs=0).json()["choices"][0]
    assert both["logprobs"]["top_logprobs"] is None and all(len(each) >= 2 for each in both["prompt_logprobs"][1:])


def test_best_of_returns_the_samples_with_the_highest_mean_log_probability(server):
    prompts = [PROMPT, [1, 2]]
    options = dict(prompt=prompts, max_tokens=6, seed=2, logprobs=0, return_token_ids=True)
    drawn = server.complete(**options, n=5).json()["choices"]
    answer = server.complete(**options, n=2, best_of=5).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in drawn)

    def mean(choice):
        return math.fsum(choice["logprobs"]["token_logprobs"]) / len(choice["token_ids"])

    for number in range(2):
        best = sorted(drawn[5 * number : 5 * number + 5], key=mean, reverse=True)[:2]
        found = answer["choices"][2 * number : 2 * number + 2]
        assert [choice["token_ids"] for choice in found] == [choice["token_ids"] for choice in best]


def test_a_truncated_prompt_is_its_last_tokens(server):
    options = dict(max_tokens=3, seed=1, return_token_ids=True)
    for keep, expected in ((2, PROMPT[-2:]), (99, PROMPT)):
        (choice,) = server.complete(prompt=PROMPT, truncate_prompt_tokens=keep, **options).json()["choices"]
        assert choice["prompt_token_ids"] == expected
    (choice,) = server.complete(prompt=[7] * 600, truncate_prompt_tokens=-1, **options).json()["choices"]
    assert len(choice["prompt_token_ids"]) == 512 - 3
    chat = server.chat("a b c d e f", truncate_prompt_tokens=4, **options).json()
    whole = server.chat("a b c d e f", **options).json()
    assert chat["prompt_token_ids"] == whole["prompt_token_ids"][-4:]
    echoed = server.complete(prompt="def main(x)", truncate_prompt_tokens=1, echo=True, **options).json()["choices"][0]
    assert echoed["text"].startswith(server.service.tokenizer.decode(echoed["prompt_token_ids"]))
    assert not echoed["text"].startswith("def")


REFUSED = [
    ({"max_tokens": 0}, "max_tokens", "max_tokens is 0, which needs echo: true"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "must be an object of biases from -100 to 100 by token id"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "must be an object of biases"),
    ({"logit_bias": {"99999999": 1}}, "logit_bias", "logit_bias has the token 99999999"),
    ({"min_tokens": 17}, "min_tokens", "min_tokens 17 is more than max_tokens 16"),
    ({"frequency_penalty": 2.1}, "frequency_penalty", "less than or equal to 2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
    ({"presence_penalty": False}, "presence_penalty", "valid number"),
    ({"best_of": 2, "n": 3}, "best_of", "best_of is 2, less than n, 3"),
    ({"best_of": 2, "stream": True}, "best_of", "remove it or stream"),
    ({"best_of": 1000}, "best_of", "best_of is 1000; this server allows 128"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not in streams"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "less than or equal to 20"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "keep at least one token"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "or -1: as many as fit"),
    ({"echo": True, "begun": [[1]], "seed": 1}, "echo", "remove one of them"),
    ({"suffix": "x"}, "suffix", "suffix is not supported here"),
]


@pytest.mark.parametrize(("fields", "param", "said"), REFUSED, ids=str)
def test_what_makes_no_sense_is_refused_by_name(server, fields, param, said):
    answer = server.complete(**{"prompt": PROMPT} | fields)
    error = answer.json()["error"]
    assert answer.status_code == 400 and said in error["message"] and error["param"] == param, error


def test_too_many_log_probabilities_of_prompts_are_refused_before_any_work(server, monkeypatch):
    monkeypatch.setattr(prompt_logprobs, "MOST", 5 * 3 * 2)
    assert server.complete(prompt=PROMPT, prompt_logprobs=2, n=2, max_tokens=1).status_code == 200
    for fields, name in (({"prompt_logprobs": 3}, "prompt_logprobs"), ({"echo": True, "logprobs": 3}, "echo")):
        answer = server.complete(prompt=PROMPT, n=2, max_tokens=1, **fields)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name
        assert "would have 40 log-probabilities of prompts, more than 30" in answer.json()["error"]["message"]


def test_a_request_whose_grammar_fails_gets_its_error_and_others_their_tokens(server, monkeypatch):
    monkeypatch.setattr(Matcher, "accept", lambda self, token: False)
    answer = server.complete(prompt=PROMPT, structured_outputs={"regex": "[ab]{9}"})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "grammar_failed" and "does not allow" in error["message"]
    assert server.complete(prompt=PROMPT, seed=8).status_code == 200


DEFAULTS = {
    "temperature": 0.6,
    "top_k": 5,
    "top_p": 0.9,
    "repetition_penalty": 1.3,
    "max_new_tokens": 7,
    "do_sample": True,
}


@pytest.fixture(scope="module")
def configured(tmp_path_factory, chat_folder):
    import shutil

    folder = tmp_path_factory.mktemp("configured") / "model"
    shutil.copytree(chat_folder, folder)
    path = folder / "generation_config.json"
    values = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(values | DEFAULTS))
    return folder


def test_the_models_sampling_defaults_hold_where_a_request_gives_none(configured, server):
    sampling = {"temperature": 0.6, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.3}
    own = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "repetition_penalty": 1.0}
    body = dict(prompt=PROMPT, max_tokens=9, seed=1, return_token_ids=True)

    def tokens(running, **more):
        return running.complete(**body | more).json()["choices"][0]["token_ids"]

    expected, free = tokens(server, **sampling), tokens(server)
    assert expected != free
    with running_server(configured) as running:
        assert tokens(running) == expected and tokens(running, **own) == free
        chat = running.chat("x", seed=1).json()
        assert chat["usage"]["completion_tokens"] <= 7 == DEFAULTS["max_new_tokens"]
        assert running.chat("x", seed=1, max_tokens=20, ignore_eos=True).json()["usage"]["completion_tokens"] == 20
        listed = httpx.get(f"{running.url}/v1/models").json()["data"][0]["sampling_defaults"]
        assert listed == sampling | {"max_tokens": 7}
    with running_server(configured, generation_config="vllm") as running:
        assert tokens(running) == free
        assert httpx.get(f"{running.url}/v1/models").json()["data"][0]["sampling_defaults"] == {}


def test_defaults_that_cannot_be_used_name_their_file(tmp_path, configured):
    from lockstep.errors import UserError
    from lockstep.generate.server.generation_config import sampling_defaults

    (tmp_path / "config.json").write_text("{}")
    assert sampling_defaults(tmp_path) == {}
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"temperature": None, "top_k": -1, "min_p": 0.1}))
    assert sampling_defaults(tmp_path) == {"top_k": 0, "min_p": 0.1}
    path.write_text(json.dumps({"top_p": 7}))
    with pytest.raises(UserError, match="generation_config.json: top_p is 7; .*--generation-config vllm"):
        sampling_defaults(tmp_path)


def test_a_text_of_a_chat_has_the_bits_of_score_for_its_prompt(server, chat_folder):
    answer = server.chat("2+2=", max_tokens=2, prompt_logprobs=0, return_token_ids=True, seed=1).json()
    own = [
        entries[str(token)]["logprob"]
        for token, entries in zip(answer["prompt_token_ids"][1:], answer["prompt_logprobs"][1:])
    ]
    assert torch.equal(torch.tensor(own), score(load_model(chat_folder), [answer["prompt_token_ids"]])[0])
