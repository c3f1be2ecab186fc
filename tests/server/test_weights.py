"""New weights into a running server: no request is dropped, and a bad folder changes nothing."""

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

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


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory, chat_folder):
    """Other weights of the same model."""
    return _save(chat_folder, tmp_path_factory.mktemp("other"), seed=9)


def _save(chat_folder, folder, seed):
    model = build_model(load_model(chat_folder).config, dtype="bfloat16", seed=seed)
    with torch.no_grad():
        model.embed_tokens.weight.mul_(2)
    save_model(model, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(chat_folder / name, folder)
    return folder


@pytest.fixture(scope="module")
def updated(tmp_path_factory, chat_folder):
    """A server of a run whose checkpoints of steps 1 and 2 have different weights, and a manifest each."""
    steps = tmp_path_factory.mktemp("run") / "run" / "checkpoints"
    for step in (1, 2):
        folder = steps / f"step_{step:08}"
        folder.mkdir(parents=True)
        write_manifest(_save(chat_folder, folder, seed=step), [])
    with running_server(steps / "step_00000001", admin_key="secret") as running:
        running.steps = steps
        yield running


def test_a_stream_continues_under_new_weights_and_says_which_token_came_from_which(updated):
    prompt, client = [3, 1, 4, 1, 5], updated.http()
    body = dict(prompt=prompt, max_tokens=200, seed=1, ignore_eos=True, stream=True, logprobs=0)
    ids, versions, logprobs = [], [], []
    with client, client.stream("POST", "/v1/completions", json=body | {"return_token_ids": True}) as stream:
        for line in stream.iter_lines():
            if line and line != "data: [DONE]":
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                ids += choice["token_ids"]
                versions += choice["weights_versions"]
                logprobs += choice["logprobs"]["token_logprobs"]
            if len(ids) == 20 and versions[-1] == 1:
                answer = _update(updated, version=2)
                assert answer.status_code == 200 and answer.json()["weights_version"] == 2, answer.text
        assert client.get("/health").json()["weights_version"] == 2
    assert len(ids) == 200 and choice["finish_reason"] == "length"
    switch = versions.index(2)
    assert switch >= 20 and versions == [1] * switch + [2] * (200 - switch)
    for step, part in ((1, slice(0, switch)), (2, slice(switch, 200))):
        model = load_model(updated.steps / f"step_{step:08}")
        expected = score(model, [prompt + ids])[0][len(prompt) - 1 :][part]
        assert torch.equal(torch.tensor(logprobs[part]), expected)


def test_updates_under_load_drop_no_request(updated):
    def ask(seed):
        body = dict(prompt=[seed + 1] * 30, max_tokens=40, n=2, seed=seed, ignore_eos=True, return_token_ids=True)
        return updated.complete(**body)

    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(ask, seed) for seed in range(6)]
        for version in (2, 1, 2):
            assert _update(updated, version=version).status_code == 200
    assert [answer.result().status_code for answer in answers] == [200] * 6
    assert all(len(c["token_ids"]) == 40 for answer in answers for c in answer.result().json()["choices"])


def test_updates_are_applied_in_order_however_long_their_checksums_take_and_hold_up_no_request(updated, monkeypatch):
    begun, read = threading.Event(), threading.Event()  # a checksum of gigabytes, which the test has not got

    def slow(folder):
        if folder.name == "step_00000002":
            begun.set()
            read.wait(30)
        return ""

    monkeypatch.setattr(weights, "damage_of_model", slow)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(_update, updated, version=2)
        begun.wait(30)
        second = pool.submit(_update, updated, version=1)
        try:
            assert updated.complete(prompt=[1, 2, 3], max_tokens=4).status_code == 200 and not first.done()
        finally:
            read.set()
    assert first.result().status_code == second.result().status_code == 200
    with updated.http() as client:
        assert client.get("/health").json()["weights_version"] == 1


def test_a_checkpoint_with_a_flipped_bit_leaves_the_old_weights(updated):
    asked = dict(prompt=[1, 2, 3], max_tokens=4, temperature=0, return_token_ids=True)
    before = updated.complete(**asked).json()
    with (updated.steps / "step_00000002" / "model.safetensors").open("r+b") as file:
        file.seek(-100, 2)
        byte = file.read(1)[0]
        file.seek(-100, 2)
        file.write(bytes([byte ^ 4]))
    answer = _update(updated, version=2)
    assert answer.status_code == 400 and "does not match its checksum" in answer.text
    assert updated.complete(**asked).json()["choices"] == before["choices"]


def _set(**values):
    """Changes config.json."""

    def changed(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return changed


def _other_rope(folder):
    values = json.loads((folder / "config.json").read_text())["rope_parameters"]
    _set(rope_parameters=values | {"rope_theta": 123.0})(folder)


def _giant_header(folder):
    header = json.dumps({"model.norm.weight": {"dtype": "BF16", "shape": [10**12], "data_offsets": [0, 2 * 10**12]}})
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(100))


def _integers(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"].long()}, folder / "model.safetensors")


BREAKAGES = [
    (_set(vocab_size="abc"), "vocab_size is 'abc'"),
    (_set(num_hidden_layers=2_000_000), "num_hidden_layers is 2000000 .* a model has 1 to 1024 layers"),
    (lambda folder: (folder / "config.json").write_text('{"a":' * 10**5), "not valid JSON"),
    (_integers, "is I64"),
    (_giant_header, "cannot be read as safetensors"),
    (_other_rope, "rope_theta is 123.0"),
    (lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": [1]}'), "weight_map"),
]


@pytest.fixture(scope="module")
def model(chat_folder):
    return load_model(chat_folder)


@pytest.mark.parametrize(("breakage", "message"), BREAKAGES)
def test_a_bad_folder_leaves_the_old_weights(tmp_path, model, other_folder, breakage, message):
    before = [p.clone() for p in model.parameters()]
    shutil.copytree(other_folder, tmp_path, dirs_exist_ok=True)
    breakage(tmp_path)
    with pytest.raises(UserError, match=message):
        load_weights(model, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_a_folder_that_describes_more_than_it_holds_is_refused_before_anything_is_made_of_it(tmp_path, other_folder):
    shutil.copytree(other_folder, tmp_path, dirs_exist_ok=True)
    whole = (tmp_path / "config.json").read_text()
    for breakage in (
        _set(num_hidden_layers=1024, layer_types=None),
        _set(hidden_size=10**12),
        _set(intermediate_size=10**15),
    ):
        (tmp_path / "config.json").write_text(whole)
        breakage(tmp_path)
        with pytest.raises(UserError, match="weights, but the files have"):
            load_model(tmp_path)


def test_loaded_weights_are_the_folders_and_stay_the_same_tensors(chat_folder, other_folder):
    model, other = load_model(chat_folder), load_model(other_folder)
    storages = [p.data_ptr() for p in model.parameters()]
    load_weights(model, other_folder)
    assert storages == [p.data_ptr() for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters()))


def test_a_server_says_what_is_wrong_with_a_folder_and_keeps_its_weights(server, tmp_path, other_folder):
    before = server.complete(prompt="abc", max_tokens=5, seed=1).json()["choices"]
    broken = []
    for number, breakage in enumerate((_set(vocab_size="abc"), _giant_header, _integers)):
        broken.append(shutil.copytree(other_folder, tmp_path / str(number)))
        breakage(broken[-1])
    bodies = [{"path": str(folder)} for folder in (tmp_path, *broken, "/nowhere", "\x00")]
    for body in (*bodies, {"version": 3}, {}, {"path": 5}):
        answer = _update(server, **body)
        assert answer.status_code == 400 and answer.json()["error"]["message"], body
    assert server.complete(prompt="abc", max_tokens=5, seed=1).json()["choices"] == before
    with pytest.raises(ApiError, match="unknown field 'pth'; there are: path, version") as refused:
        parse_body(b'{"pth": "x"}', WeightsRequest)
    assert (refused.value.param, refused.value.code) == ("pth", "unknown_parameter")


def test_only_the_admin_key_opens_the_route(server):
    for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": b"Bearer secr\xc3\xa9t"}):
        assert _update(server, headers=headers, path="x").status_code == 401
