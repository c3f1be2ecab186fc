"""Adapters of the served model: several in one batch, loaded and unloaded while requests run."""

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch

from lockstep import load_model, score
from lockstep.config import CompileConfig, RanksConfig, ServeConfig, validate
from lockstep.errors import UserError
from lockstep.generate.server import adapters as server_adapters
from lockstep.model import lora_of, save_adapter
from lockstep.model.adapters import build_adapter
from tests.server.conftest import running_server, server_process

ADMIN = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, chat_folder):
    """A folder with adapters of the small model."""
    home, base = tmp_path_factory.mktemp("adapters"), load_model(chat_folder)
    for number, name in enumerate(("one", "two", "three")):
        adapter = build_adapter(base, lora_of(base.config, 4 + number, 8.0, ("*_proj",)), number)
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for _, b in adapter.matrices.values():
                b.weight.copy_(0.1 * torch.randn(b.weight.shape, generator=generator))
        save_adapter(adapter, home / name, chat_folder)
    return home


@pytest.fixture(scope="module")
def served(chat_folder, folders):
    options = dict(model_name="small", admin_key="secret", api_key="user", lora_folder=str(folders), max_loras=2)
    with running_server(chat_folder, lora_modules=(f"one={folders / 'one'}",), **options) as running:
        yield running


def _post(running, route, key="secret", **body):
    with running.http(headers={"Authorization": f"Bearer {key}"}) as client:
        return client.post(route, json=body)


def _load(running, name, path, **options):
    return _post(running, "/v1/load_lora_adapter", lora_name=name, lora_path=str(path), **options)


def _unload(running, name):
    return _post(running, "/v1/unload_lora_adapter", lora_name=name)


def _models(running):
    with running.openai("user") as client:
        return list(client.models.list())


def _require_bits(folder, prompt, answer):
    (scores,) = score(load_model(folder), [prompt + answer.choices[0].token_ids])
    assert torch.equal(scores[len(prompt) - 1 :], torch.tensor(answer.choices[0].logprobs.token_logprobs))


def test_models_in_one_batch_have_the_bits_they_have_alone_and_are_listed_as_vllm_does(served, chat_folder, folders):
    answer = _load(served, "two", "two")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'two' added successfully.")
    base, one, two = _models(served)
    assert (base.id, base.parent, base.root) == ("small", None, str(chat_folder))
    assert (one.id, one.parent, one.root) == ("one", "small", str(folders / "one"))
    assert (two.id, two.parent, two.root) == ("two", "small", "two")
    prompts = {name: [7, number, 5, 9] for number, name in enumerate(("small", "one", "two"))}
    extra = {"return_token_ids": True, "ignore_eos": True}
    with served.openai("user") as client:

        def complete(name):
            return client.completions.create(
                model=name, prompt=prompts[name], max_tokens=60, seed=1, logprobs=0, extra_body=extra
            )

        with ThreadPoolExecutor(6) as threads:
            answers = list(threads.map(complete, [*prompts] * 2))
        message = client.chat.completions.create(
            model="two", messages=[{"role": "user", "content": "hi"}], max_tokens=4
        )
        assert message.model == "two" and client.models.retrieve("two").parent == "small"
    where = {"small": chat_folder, "one": folders / "one", "two": folders / "two"}
    for answer in answers:
        _require_bits(where[answer.model], prompts[answer.model], answer)
    with served.http(headers=ADMIN) as client:
        sizes = client.get("/admin/model").json()["adapters"]
    assert (sizes["max"], list(sizes["loaded"]), sizes["loaded"]["two"]["rank"]) == (2, ["one", "two"], 5)
    assert sizes["bytes"] == sum(each["bytes"] for each in sizes["loaded"].values()) > 0
    assert _unload(served, "two").text == "Success: LoRA adapter 'two' removed successfully."


def test_a_running_request_finishes_with_its_unloaded_adapter_and_new_ones_get_a_404(served, folders):
    assert _load(served, "two", folders / "two").status_code == 200
    prompt, extra = [1, 2, 3], {"return_token_ids": True, "ignore_eos": True}
    options = dict(model="two", prompt=prompt, max_tokens=120, seed=1, logprobs=0, extra_body=extra)
    with served.openai("user") as client:
        token_ids, logprobs = [], []
        for chunk in client.completions.create(stream=True, **options):
            choice = chunk.choices[0]
            token_ids += choice.token_ids
            logprobs += choice.logprobs.token_logprobs
            if len(token_ids) == 1:
                assert _unload(served, "two").status_code == 200
                answer = _post(served, "/v1/completions", "user", model="two", prompt=prompt)
                assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
                # Another one under its name, which the running request does not get.
                assert _load(served, "two", "three").status_code == 200
        assert len(token_ids) == 120
        (scores,) = score(load_model(folders / "two"), [prompt + token_ids])
        assert torch.equal(scores[len(prompt) - 1 :], torch.tensor(logprobs))
        _require_bits(folders / "three", prompt, client.completions.create(**options))
    assert _unload(served, "two").status_code == 200


def test_what_cannot_be_loaded_is_named_and_changes_nothing(served, folders, chat_folder, tmp_path):
    (folders / "outside").symlink_to(tmp_path)
    (folders / "linked").mkdir()
    for file in (folders / "two").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
        (folders / "linked" / file.name).symlink_to(tmp_path / file.name)
    (folders / "damaged").mkdir()
    for file in (folders / "two").iterdir():
        (folders / "damaged" / file.name).write_bytes(file.read_bytes()[:100])
    wrong = [
        (("one", "one"), 400, "already been loaded"),
        (("small", "one"), 400, "already been loaded"),
        (("x", "nowhere"), 404, "no adapter found for 'nowhere'"),
        (("x", "../one"), 400, "not in the folder that --lora-folder names"),
        (("x", tmp_path), 400, "not in the folder"),
        (("x", chat_folder), 400, "not in the folder"),
        (("x", "outside"), 400, "not in the folder"),
        (("x", "linked"), 400, "not in the folder"),
        (("x", "two\0"), 400, "cannot be read"),
        (("x", "damaged"), 400, "damaged"),
        (("x", "."), 400, "not an adapter's folder"),
        (("", "two"), 400, "lora_name must be a name of 1 to 256 characters"),
    ]
    for arguments, status, message in wrong:
        answer = _load(served, *arguments)
        assert answer.status_code == status and message in answer.json()["error"]["message"], answer.text
    answer = _unload(served, "nothing")
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "invalid_request_error")
    assert (
        _post(served, "/v1/load_lora_adapter", lora_name="x")
        .json()["error"]["message"]
        .startswith("lora_path is missing")
    )
    assert _load(served, "two", "two").status_code == 200
    answer = _load(served, "three", "three")
    assert answer.status_code == 400 and "2 adapters are loaded, the server's limit" in answer.text
    answer = _post(served, "/admin/weights", path=str(chat_folder))
    assert answer.status_code == 400 and "(one, two); unload them first" in answer.json()["error"]["message"]
    assert _unload(served, "two").status_code == 200
    assert [each.id for each in _models(served)] == ["small", "one"] and list(served.engine.adapters) == ["one"]


def test_only_the_admin_key_loads_adapters(served, chat_folder, folders):
    for key in ("user", "wrong"):
        assert _load(served, "two", "two", key=key).status_code == 401
        assert _post(served, "/v1/unload_lora_adapter", key, lora_name="one").status_code == 401
    with running_server(chat_folder, lora_modules=(f"one={folders / 'one'}",)) as without:
        assert _load(without, "two", "two").status_code == 404
    with running_server(chat_folder, admin_key="secret") as without:
        answer = _load(without, "two", "two")
        assert answer.status_code == 400 and "started without --lora-folder" in answer.text


def test_requests_continue_while_an_adapter_is_read(served, monkeypatch):
    begun, finish = threading.Event(), threading.Event()
    read = server_adapters.read_adapter

    def slow(*arguments):
        begun.set()
        assert finish.wait(30)
        return read(*arguments)

    monkeypatch.setattr(server_adapters, "read_adapter", slow)
    with ThreadPoolExecutor(1) as threads:
        loading = threads.submit(_load, served, "two", "two")
        assert begun.wait(30)
        assert _post(served, "/v1/completions", "user", prompt=[1, 2], max_tokens=3).status_code == 200
        assert _post(served, "/v1/completions", "user", model="two", prompt=[1, 2]).status_code == 404
        finish.set()
        assert loading.result(30).status_code == 200
    assert _unload(served, "two").status_code == 200


def test_impossible_settings_are_refused_before_anything_is_loaded():
    wrong = [
        (dict(lora_modules=("one",)), "'one'; give each adapter as NAME=FOLDER"),
        (dict(lora_modules=("one=",)), "'one='; give each adapter as NAME=FOLDER"),
        (dict(lora_modules=("one=a", "one=b")), "the name 'one', which another adapter or the model has"),
        (dict(lora_modules=("one=a", "two=b"), max_loras=1), "2 adapters, but max_loras is 1"),
        (dict(lora_folder="adapters"), "set admin_key"),
        (dict(lora_modules=("one=a",), compile=CompileConfig("inductor")), r"leave out compile\.backend"),
        (dict(lora_modules=("one=a",), parallel=RanksConfig(tensor=2)), r"adapters do not work with parallel\.tensor"),
    ]
    for options, message in wrong:
        with pytest.raises(UserError, match=message):
            validate(ServeConfig(model="model", **options))


@pytest.mark.slow
def test_a_command_line_names_several_adapters_as_vllm_does(chat_folder, folders):
    modules = [f"{name}={folders / name}" for name in ("one", "two")]
    with server_process(chat_folder, "--lora-modules", *modules) as (_, url):
        assert [each["id"] for each in httpx.get(f"{url}/v1/models").json()["data"]][1:] == ["one", "two"]
        answer = httpx.post(f"{url}/v1/completions", json={"model": "two", "prompt": [1, 2], "max_tokens": 2})
        assert answer.json()["model"] == "two", answer.text
