"""Texts as tokens and back: what transformers' tokenizer of the same folder gives, within the server's limits."""

import pytest

from tests.server.conftest import running_server

TEXTS = ["def main():\n    return é", "<|endoftext|>x", " two  spaces", "\N{SNOWMAN}"]


@pytest.fixture(scope="module")
def theirs(chat_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(chat_folder)


def _post(server, path, **body):
    with server.http() as http:
        return http.post(path, json=body)


def test_tokens_names_and_texts_are_those_of_transformers(server, theirs):
    for text in TEXTS:
        for special in (True, False):
            answer = _post(server, "/tokenize", prompt=text, add_special_tokens=special, return_token_strs=True).json()
            expected = theirs(text, add_special_tokens=special).input_ids
            assert answer["tokens"] == expected and answer["count"] == len(expected)
            assert answer["token_strs"] == theirs.convert_ids_to_tokens(expected)
            assert answer["max_model_len"] == 512
        back = _post(server, "/detokenize", tokens=answer["tokens"]).json()
        assert back == {"prompt": text} == {"prompt": theirs.decode(answer["tokens"])}
    assert _post(server, "/tokenize", prompt="").json()["count"] == 0
    assert _post(server, "/tokenize", prompt="x").json()["token_strs"] is None
    assert _post(server, "/detokenize", tokens=[]).json() == {"prompt": ""}


def test_a_chats_tokens_are_those_of_its_request(server):
    body = dict(messages=[{"role": "user", "content": "hello"}], max_tokens=2)
    answer = server.chat(**body, return_token_ids=True).json()
    counted = _post(server, "/tokenize", **body).json()
    assert counted["tokens"] == answer["prompt_token_ids"] and counted["count"] == answer["usage"]["prompt_tokens"]


def test_special_tokens_are_added_as_the_tokenizers_post_processor_does(tmp_path, chat_folder):
    import json
    import shutil

    from transformers import AutoTokenizer

    folder = tmp_path / "model"
    shutil.copytree(chat_folder, folder)
    file = json.loads((folder / "tokenizer.json").read_text())
    (end,) = [token["id"] for token in file["added_tokens"]]
    name = file["added_tokens"][0]["content"]
    single = [{"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    file["post_processor"] = {
        "type": "TemplateProcessing", "single": single, "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {name: {"id": name, "ids": [end], "tokens": [name]}},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(file))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"bos_token": name}))
    expected = AutoTokenizer.from_pretrained(folder)("hello").input_ids
    with running_server(folder) as running:
        assert _post(running, "/tokenize", prompt="hello").json()["tokens"] == expected
        plain = _post(running, "/tokenize", prompt="hello", add_special_tokens=False).json()["tokens"]
        assert [end, *plain] == expected


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": 3}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "promt": 1}, 400, "promt"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "x" * 200_000}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [{"role": "user"}]}, 400, "messages"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [99999]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1] * (2**18 + 2)}, 413, None),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused(server, path, body, status, param):
    answer = _post(server, path, **body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param


def test_they_need_the_key_and_a_place_as_other_work(chat_folder):
    with running_server(chat_folder, api_key="k", max_requests=1) as running:
        for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
            assert _post(running, path, **body).status_code == 401
            with running.http(headers={"Authorization": "Bearer k"}) as http:
                assert http.post(path, json=body).status_code == 200
                running.service.limits.requests += 1
                assert http.post(path, json=body).status_code == 429
                running.service.limits.requests -= 1
