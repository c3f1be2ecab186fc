"""New weights into a running server: no request is dropped, and a bad folder changes nothing."""

import json
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep import build_model, load_model, save_model, score
from lockstep.checkpoint.manifest import write_manifest
from lockstep.errors import UserError
from lockstep.generate.server import weights
from lockstep.generate.server.api_error import ApiError
from lockstep.generate.server.body import parse_body
from lockstep.generate.server.protocol import WeightsRequest
from lockstep.model import load_weights
from tests.server.conftest import running_server

ADMIN = {"Authorization": "Bearer secret"}


def _update(running, headers=ADMIN, **body):
    with running.http() as client:
        return client.post("/admin/weights", json=body, headers=headers)


def _save_other(chat_folder, folder, seed):
    config = load_model(chat_folder).config
    model = build_model(config, dtype="bfloat16", seed=seed)
    with torch.no_grad():
        model.embed_tokens.weight.mul_(2)
    save_model(model, folder)
    return model


@pytest.fixture
def run_folder(tmp_path, chat_folder):
    """A run whose checkpoints of steps 1 and 2 have different weights."""
    for step in (1, 2):
        folder = tmp_path / "run" / "checkpoints" / f"step_{step:08}"
        _save_other(chat_folder, folder, seed=step)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_text((chat_folder / name).read_text())
    return tmp_path / "run"


def test_a_stream_goes_on_under_new_weights_and_says_which_token_came_from_which(run_folder):
    first, second = (run_folder / "checkpoints" / f"step_{step:08}" for step in (1, 2))
    with running_server(first, admin_key="secret") as running, running.http() as client:
        prompt = [3, 1, 4, 1, 5]
        body = dict(prompt=prompt, max_tokens=300, seed=1, ignore_eos=True, stream=True, logprobs=0)
        ids, versions, logprobs = [], [], []
        with client.stream("POST", "/v1/completions", json=body | {"return_token_ids": True}) as stream:
            for line in stream.iter_lines():
                if line and line != "data: [DONE]":
                    choice = json.loads(line.removeprefix("data: "))["choices"][0]
                    ids += choice["token_ids"]
                    versions += choice["weights_versions"]
                    logprobs += choice["logprobs"]["token_logprobs"]
                if len(ids) == 20 and versions[-1] == 1:
                    answer = _update(running, version=2)
                    assert answer.status_code == 200, answer.text
                    assert answer.json()["weights_version"] == 2
        assert len(ids) == 300 and choice["finish_reason"] == "length"
        switch = versions.index(2)
        assert switch >= 20 and versions == [1] * switch + [2] * (300 - switch)
        for folder, part in ((first, slice(0, switch)), (second, slice(switch, 300))):
            expected = score(load_model(folder), [prompt + ids])[0][len(prompt) - 1 :][part]
            assert torch.equal(torch.tensor(logprobs[part]), expected)
        assert client.get("/health").json()["weights_version"] == 2


def test_updates_under_load_drop_no_request(run_folder):
    with running_server(run_folder / "checkpoints" / "step_00000001", admin_key="secret") as running:
        answers = []

        def ask(seed):
            body = dict(prompt=[seed + 1] * 30, max_tokens=60, n=2, seed=seed, ignore_eos=True, return_token_ids=True)
            answers.append(running.complete(**body))

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(12)]
        for thread in threads:
            thread.start()
        for version in (2, 1, 2):
            assert _update(running, version=version).status_code == 200
        for thread in threads:
            thread.join()
        assert [a.status_code for a in answers] == [200] * 12
        assert all(len(c["token_ids"]) == 60 for a in answers for c in a.json()["choices"])


def _remove_tensor(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors")


def _reshape(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros(3)
    save_file(tensors, folder / "model.safetensors")


def _truncate(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def _other_rope(folder):
    values = json.loads((folder / "config.json").read_text())
    values["rope_parameters"]["rope_theta"] = 123.0
    (folder / "config.json").write_text(json.dumps(values))


def _set(**values):
    """Changes config.json."""

    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return change


def _integers(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].long()
    save_file(tensors, folder / "model.safetensors")


def _giant_header(folder):
    header = json.dumps({"model.norm.weight": {"dtype": "BF16", "shape": [10**12], "data_offsets": [0, 2 * 10**12]}})
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(100))


BREAKAGES = [
    (_set(vocab_size="abc"), "vocab_size is 'abc'"),
    (_set(num_hidden_layers=2_000_000), "num_hidden_layers is 2000000 .* a model has 1 to 1024 layers"),
    (_set(num_hidden_layers=True), "num_layers is True"),
    (_set(hidden_size=10**12), "dim is 1000000000000"),
    (_set(rms_norm_eps=[1]), "norm_eps is"),
    (_set(rope_parameters=[1]), "rope_parameters is"),
    (_set(rope_parameters={"rope_theta": "x"}), "rope_theta is 'x'"),
    (_set(eos_token_id={"a": 1}), "eos_token_id is"),
    (_set(architectures=[5]), "architectures is"),
    (lambda folder: (folder / "config.json").write_text('{"a":' * 10**5), "not valid JSON"),
    (lambda folder: (folder / "config.json").write_bytes(b"\xff{}"), "not valid JSON"),
    (_integers, "is I64"),
    (_giant_header, "cannot be read as safetensors"),
    (_remove_tensor, "up_proj.weight is missing"),
    (_reshape, "has shape"),
    (_truncate, "cannot be read as safetensors"),
    (_other_rope, "rope_theta is 123.0"),
    (lambda folder: (folder / "config.json").write_text("[]"), "not a JSON object"),
    (lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": [1]}'), "weight_map"),
]


def test_a_checkpoint_with_a_flipped_bit_leaves_the_old_weights(run_folder):
    steps = run_folder / "checkpoints"
    write_manifest(steps / "step_00000002", [])
    with running_server(steps / "step_00000001", admin_key="secret") as running:
        before = running.complete(prompt=[1, 2, 3], max_tokens=4, temperature=0, return_token_ids=True).json()
        with (steps / "step_00000002" / "model.safetensors").open("r+b") as file:
            file.seek(-100, 2)
            byte = file.read(1)[0]
            file.seek(-100, 2)
            file.write(bytes([byte ^ 4]))
        answer = _update(running, version=2)
        assert answer.status_code == 400 and "does not match its checksum" in answer.text
        after = running.complete(prompt=[1, 2, 3], max_tokens=4, temperature=0, return_token_ids=True).json()
        assert before["choices"] == after["choices"]


def test_other_requests_are_answered_while_checksums_are_read(run_folder, monkeypatch):
    read = threading.Event()  # a checksum of gigabytes, which the test has not got
    monkeypatch.setattr(weights, "damage_of_model", lambda folder: "" if read.wait(30) else "never read")
    write_manifest(run_folder / "checkpoints" / "step_00000002", [])
    with running_server(run_folder / "checkpoints" / "step_00000001", admin_key="secret") as running:
        answers = []
        update = threading.Thread(target=lambda: answers.append(_update(running, version=2)))
        update.start()
        try:
            assert running.complete(prompt=[1, 2, 3], max_tokens=4).status_code == 200 and not answers
        finally:
            read.set()
            update.join()
        assert answers[0].status_code == 200, answers[0].text


def test_the_later_of_two_updates_is_the_last_however_long_its_checksums_take(run_folder, monkeypatch):
    begun, read = threading.Event(), threading.Event()

    def slow(folder):
        if folder.name == "step_00000002":
            begun.set()
            read.wait(30)
        return ""

    monkeypatch.setattr(weights, "damage_of_model", slow)
    for step in (1, 2):
        write_manifest(run_folder / "checkpoints" / f"step_{step:08}", [])
    with running_server(run_folder / "checkpoints" / "step_00000001", admin_key="secret") as running:
        first = threading.Thread(target=_update, args=(running,), kwargs={"version": 2})
        first.start()
        begun.wait(30)
        second = threading.Thread(target=_update, args=(running,), kwargs={"version": 1})
        second.start()
        second.join(0.5)
        read.set()
        first.join()
        second.join()
        with running.http() as client:
            assert client.get("/health").json()["weights_version"] == 1


def test_an_unknown_field_has_its_name_and_code():
    with pytest.raises(ApiError, match="unknown field 'pth'; there are: path, version") as refused:
        parse_body(b'{"pth": "x"}', WeightsRequest)
    assert (refused.value.param, refused.value.code) == ("pth", "unknown_parameter")


@pytest.mark.parametrize(("breakage", "message"), BREAKAGES)
def test_a_bad_folder_leaves_the_old_weights(tmp_path, chat_folder, breakage, message):
    model = load_model(chat_folder)
    before = [p.clone() for p in model.parameters()]
    _save_other(chat_folder, tmp_path, seed=9)
    breakage(tmp_path)
    with pytest.raises(UserError, match=message):
        load_weights(model, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


@pytest.mark.parametrize(
    "breakage", [_set(num_hidden_layers=1024), _set(hidden_size=10**12), _set(intermediate_size=10**15)]
)
def test_a_folder_that_describes_more_than_it_holds_is_refused_before_anything_is_made_of_it(
    tmp_path, chat_folder, breakage
):
    _save_other(chat_folder, tmp_path, seed=9)
    breakage(tmp_path)
    with pytest.raises(UserError, match="weights, but the files have"):
        load_model(tmp_path)


def test_a_malformed_folder_is_answered_with_400_and_the_old_weights_go_on(server, tmp_path, chat_folder):
    before = server.complete(prompt="abc", max_tokens=5, seed=1).json()["choices"]
    for breakage in (_set(vocab_size="abc"), _giant_header, _integers):
        _save_other(chat_folder, tmp_path, seed=9)
        breakage(tmp_path)
        assert _update(server, path=str(tmp_path)).status_code == 400
    assert server.complete(prompt="abc", max_tokens=5, seed=1).json()["choices"] == before


def test_loaded_weights_are_the_folders_and_stay_the_same_tensors(tmp_path, chat_folder):
    model = load_model(chat_folder)
    storages = [p.data_ptr() for p in model.parameters()]
    other = _save_other(chat_folder, tmp_path, seed=9)
    load_weights(model, tmp_path)
    assert storages == [p.data_ptr() for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters()))


def test_the_server_says_what_is_wrong_with_a_folder_and_goes_on(server, tmp_path):
    for body in ({"path": str(tmp_path)}, {"path": "/nowhere"}, {"path": "\x00"}, {"version": 3}, {}, {"path": 5}):
        answer = _update(server, **body)
        assert answer.status_code == 400 and answer.json()["error"]["message"], body
    assert server.complete(prompt="x", max_tokens=2).status_code == 200


def test_only_the_admin_key_opens_the_route_and_without_one_there_is_none(server, chat_folder):
    for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": b"Bearer secr\xc3\xa9t"}):
        assert _update(server, headers=headers, path="x").status_code == 401
    with running_server(chat_folder, api_key="key") as running:
        assert _update(running, headers={"Authorization": "Bearer x"}, path="x").status_code == 404
