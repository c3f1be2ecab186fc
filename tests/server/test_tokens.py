"""Tokens in, tokens out: the API's numbers are the engine's and the trainer's own, bit for bit."""

import dataclasses
import json

import pytest
import torch

from lockstep import build_model, load_model, save_model, score
from lockstep.generate import Engine, SamplingParams
from lockstep.model import preset
from tests.server.conftest import running_server

PROMPTS = [[1, 2, 3, 4], [9] * 40]


def _check_scores(model, prompt, token_ids, logprobs, temperature):
    expected = score(model, [prompt + token_ids], temperature)[0][len(prompt) - 1 :]
    assert torch.equal(torch.tensor(logprobs, dtype=torch.float64), expected.double())


def test_logprobs_of_token_ids_are_the_trainers_bit_for_bit(server, chat_folder):
    temperature = 0.7
    answer = server.complete(
        prompt=PROMPTS, n=2, max_tokens=10, seed=1, temperature=temperature, logprobs=0, return_token_ids=True
    ).json()
    model = load_model(chat_folder)
    assert len(answer["choices"]) == 4
    for choice in answer["choices"]:
        prompt = PROMPTS[choice["index"] // 2]
        assert choice["prompt_token_ids"] == prompt
        assert choice["weights_versions"] == [0] * len(choice["token_ids"])
        _check_scores(model, prompt, choice["token_ids"], choice["logprobs"]["token_logprobs"], temperature)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, PROMPTS))


@pytest.fixture(scope="module")
def stripping(tmp_path_factory):
    """A server of a model whose tokenizer, like Llama 2's, writes spaces as "▁" and strips a text's first one."""
    from tokenizers import Tokenizer, decoders, models

    folder = tmp_path_factory.mktemp("stripping")
    vocabulary = {"▁": 0, "▁hello": 1, "▁world": 2, "world": 3, "s": 4}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["<s>"])
    backend.save(str(folder / "tokenizer.json"))
    save_model(build_model(preset("qwen3:micro", 6), dtype="float32", seed=1), folder)
    with running_server(folder) as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_continues_its_prompt_with_the_space_that_a_text_alone_would_lose(stripping, stream):
    tokenizer = stripping.service.tokenizer
    firsts = set()
    for prompt, seeds in (([1], range(3)), ([0, 2, 4], range(1))):
        options = dict(prompt=prompt, max_tokens=8, return_token_ids=True, logprobs=0, stream=stream)
        for seed in seeds:
            text, ids, names = _text(stripping, **options, seed=seed)
            assert tokenizer.decode(prompt) + text == tokenizer.decode(prompt + ids)
            assert "".join(names).replace("token_id:5", "") == text
            firsts.add(names[0])
            # The first token's own text as a stop string: it is found at once.
            if ids[0] != 5:
                assert _text(stripping, **options | {"stop": names[0]}, seed=seed)[:2] == ("", ids[:1])
    assert any(name.startswith(" ") for name in firsts)


def test_each_sample_continues_its_own_prompt(stripping):
    decode, prompts = stripping.service.tokenizer.decode, [[1], [5]]  # the second one has no text
    options = dict(prompt=prompts, n=4, max_tokens=4, seed=0, return_token_ids=True)
    for choice in stripping.complete(**options).json()["choices"]:
        prompt = prompts[choice["index"] // 4]
        assert decode(prompt) + choice["text"] == decode(prompt + choice["token_ids"])


def _text(server, **body):
    """Text, token ids, and the tokens' names."""
    if not body["stream"]:
        (choice,) = server.complete(**body).json()["choices"]
        return choice["text"], choice["token_ids"], choice["logprobs"]["tokens"]
    choices = [chunk["choices"][0] for chunk in server.stream(**body)]
    return (
        "".join(choice["text"] for choice in choices),
        [token for choice in choices for token in choice["token_ids"]],
        [name for choice in choices for name in choice["logprobs"]["tokens"]],
    )


def test_every_chunk_of_a_stream_carries_its_tokens(server):
    options = dict(prompt=PROMPTS, max_tokens=10, seed=1, logprobs=1, return_token_ids=True)
    whole = server.complete(**options).json()["choices"]
    merged = [{"token_ids": [], "weights_versions": [], "logprobs": []} for _ in whole]
    for choice in (choice for chunk in server.stream(**options) for choice in chunk["choices"]):
        target = merged[choice["index"]]
        if not target["token_ids"]:
            assert choice["prompt_token_ids"] == PROMPTS[choice["index"]]
        assert choice["token_ids"]
        target["token_ids"] += choice["token_ids"]
        target["weights_versions"] += choice["weights_versions"]
        target["logprobs"] += choice["logprobs"]["token_logprobs"]
    for choice, target in zip(whole, merged):
        assert target["token_ids"] == choice["token_ids"]
        assert target["weights_versions"] == choice["weights_versions"]
        assert target["logprobs"] == choice["logprobs"]["token_logprobs"]


def test_a_chat_tells_the_prompt_it_rendered(server, chat_folder, bpe_tokenizer):
    answer = server.chat("Hi", max_tokens=6, seed=1, logprobs=True, return_token_ids=True).json()
    eos = bpe_tokenizer.eos_id
    user, assistant = bpe_tokenizer.encode("<|user|>Hi"), bpe_tokenizer.encode("\n<|assistant|>")
    assert answer["prompt_token_ids"] == [*user, eos, *assistant]
    choice = answer["choices"][0]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    _check_scores(load_model(chat_folder), answer["prompt_token_ids"], choice["token_ids"], logprobs, 1.0)


def test_a_stop_token_ends_the_tokens_but_has_no_text(server):
    free = server.complete(prompt=[7, 8], max_tokens=20, seed=2, ignore_eos=True, return_token_ids=True).json()
    ids = free["choices"][0]["token_ids"]
    stop = ids[6]
    options = dict(prompt=[7, 8], max_tokens=20, seed=2, ignore_eos=True, return_token_ids=True)
    choice = server.complete(**options, stop_token_ids=[stop]).json()["choices"][0]
    assert choice["token_ids"] == ids[: ids.index(stop) + 1] and choice["finish_reason"] == "stop"
    assert choice["text"] == server.service.tokenizer.decode(choice["token_ids"][:-1])


def test_a_completion_is_that_of_an_engine_here(server, chat_folder):
    options, decode = dict(max_tokens=10, seed=1, top_p=0.8), server.service.tokenizer.decode
    answer = server.complete(prompt=PROMPTS[0], n=2, logprobs=0, return_token_ids=True, **options).json()
    (expected,) = Engine(load_model(chat_folder)).generate(PROMPTS[:1], SamplingParams(n=2, **options))
    for choice, completion in zip(answer["choices"], expected):
        assert choice["token_ids"] == completion.token_ids and choice["text"] == decode(completion.token_ids)
        assert choice["logprobs"]["token_logprobs"] == completion.logprobs
        assert choice["truncated_logprobs"] == completion.truncated_logprobs != completion.logprobs
        assert choice["finish_reason"] == completion.finish_reason
    assert answer["usage"]["completion_tokens"] == sum(len(completion.token_ids) for completion in expected)
    uncut = server.complete(prompt=PROMPTS[0], max_tokens=2, logprobs=0, return_token_ids=True).json()
    assert "truncated_logprobs" not in uncut["choices"][0]


@pytest.mark.parametrize("stop", [None, "stop string"])
def test_samples_that_were_begun_elsewhere_continue_as_they_would_have(server, stop):
    options = dict(prompt=PROMPTS[0], n=3, max_tokens=12, seed=1, logprobs=0, return_token_ids=True, ignore_eos=True)
    whole = server.complete(**options).json()["choices"]
    if stop:
        # Its beginning was sampled before, and its end is to come.
        options["stop"] = stop = whole[0]["text"][:6]
        whole = server.complete(**options).json()["choices"]
    known = [choice["token_ids"][: len(choice["token_ids"]) - left] for choice, left in zip(whole, (1, 12, 0))]
    rest = server.complete(begun=known, **options).json()["choices"]
    assert [choice["index"] for choice in rest] == [0, 1], "the third has ended"
    for choice in rest:
        expected = whole[choice["index"]]
        assert known[choice["index"]] + choice["token_ids"] == expected["token_ids"]
        new = expected["logprobs"]["token_logprobs"][-len(choice["token_ids"]) :]
        assert new == choice["logprobs"]["token_logprobs"]
        assert expected["text"].endswith(choice["text"]) and choice["finish_reason"] == expected["finish_reason"]
    assert (rest[0]["finish_reason"] == "stop") == bool(stop)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"begun": [[1]]}, "of all 2"),
        ({"seed": None}, "and a seed"),
        ({"prompt": PROMPTS}, "one prompt"),
        ({"begun": [[1] * 4, [1]]}, "max_tokens, including them, is 3"),
        ({"begun": [[10**6], []]}, "outside the vocabulary"),
        ({"begun": [[1] * 3, [1] * 3]}, "are finished"),
    ],
    ids=str,
)
def test_a_beginning_that_makes_no_sense_is_refused(server, changes, problem):
    body = dict(prompt=PROMPTS[0], n=2, max_tokens=3, seed=1, begun=[[1], []], ignore_eos=True) | changes
    answer = server.complete(**body)
    assert answer.status_code == 400 and problem in answer.text
    assert answer.json()["error"]["param"] == ("seed" if "seed" in changes else "begun")
    assert server.all_pages_free()


def test_the_model_is_described_to_who_has_the_admin_key(server, chat_folder):
    with server.http() as client:
        assert client.get("/admin/model").status_code == 401
        found = client.get("/admin/model", headers={"Authorization": "Bearer secret"}).json()
    config = load_model(chat_folder).config
    assert found["shape"] == json.loads(json.dumps(dataclasses.asdict(config)))
    assert (found["dtype"], found["compile"], found["context"]) == ("bfloat16", "none", 512)
