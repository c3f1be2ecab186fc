"""Requests out of order, sent twice, wrong, too large or abandoned; clients that are gone; restarted servers."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest
import tinker
import torch
import zstandard
from tinker import types

from lockstep.train_server import app, promises, wire
from tests.train_server.conftest import NAME, datum, log_probs, lora_client, matrices, running

TEXT = b"the quick brown fox"
PROTOBUF = {"content-type": wire.CONTENT_TYPE}


def encoded(model_id, seq_id, data, loss="cross_entropy", forward_only=False):
    """A request as the client writes it. data: pairs of tokens and the loss's inputs, targets among them."""
    request = wire.MESSAGES["ForwardBackwardRequest"](
        model_id=model_id, seq_id=seq_id, loss_fn=loss, forward_only=forward_only
    )
    for tokens, inputs in data:
        each = request.data.add()
        each.model_input.add().encoded_text.tokens = np.asarray(tokens, np.int32).tobytes()
        for name, values in inputs.items():
            array = np.asarray(values)
            tensor = each.loss_fn_inputs[name]
            tensor.dtype = wire.INT64 if array.dtype.kind == "i" else wire.FLOAT32
            tensor.dense = array.astype(wire.NUMPY[tensor.dtype]).tobytes()
            tensor.shape.extend(array.shape)
    return request.SerializeToString()


PLAIN = [(list(TEXT[:-1]), {"target_tokens": list(TEXT[1:])})]


def send(server, body, **headers):
    with server.http() as http:
        return http.post("/forward_backward", content=body, headers=PROTOBUF | headers)


def result(server, request_id):
    """The answer to a retrieval, waited for as the client does."""
    while (answer := server.post("/retrieve_future", request_id=request_id)).status_code == 408:
        pass
    return answer


def test_requests_run_in_the_order_of_their_numbers_however_they_arrive_and_once(server, client):
    training = lora_client(client)
    ids = {}
    step = {"model_id": training.model_id, "adam_params": {"learning_rate": 0.01}}
    ids[3] = server.post("/optim_step", **step, seq_id=3).json()["request_id"]
    ids[2] = send(server, encoded(training.model_id, 2, PLAIN)).json()["request_id"]
    assert server.service.model(training.model_id).trained.updates == 0, "the first request has not arrived"
    ids[1] = send(server, encoded(training.model_id, 1, PLAIN)).json()["request_id"]
    norms = json.loads(result(server, ids[3]).content)["metrics"]
    # Each of them again: nothing is computed again.
    assert send(server, encoded(training.model_id, 1, PLAIN)).json()["request_id"] == ids[1]
    assert server.post("/optim_step", **step, seq_id=3).json()["request_id"] == ids[3]
    assert json.loads(result(server, ids[3]).content)["metrics"] == norms
    assert server.service.model(training.model_id).trained.updates == 1
    assert result(server, ids[1]).content == result(server, ids[2]).content, "the same data before any update"


def test_what_is_compressed_is_read_and_a_bomb_is_refused(folder, tmp_path):
    with running(folder, tmp_path, max_body_bytes=20_000) as server, server.client() as client:
        training = lora_client(client)
        packed = zstandard.ZstdCompressor().compress(encoded(training.model_id, 1, PLAIN))
        answer = send(server, packed, **{"content-encoding": "zstd"})
        assert result(server, answer.json()["request_id"]).headers["content-type"] == wire.CONTENT_TYPE
        bomb = zstandard.ZstdCompressor().compress(bytes(10_000_000))
        refused = send(server, bomb, **{"content-encoding": "zstd"})
        assert refused.status_code == 413 and "--max-body-bytes" in refused.json()["detail"]
        assert send(server, b"\x00no", **{"content-encoding": "zstd"}).status_code == 400
        assert send(server, bytes(30_000)).status_code == 413


BAD = {
    "token outside": ([([9999], {"target_tokens": [1]})], "9999"),
    "target outside": ([([1], {"target_tokens": [-1]})], "target_tokens"),
    "lengths": ([([1, 2], {"target_tokens": [1]})], "has 2 tokens"),
    "no targets": ([([1], {})], "no loss_fn_inputs"),
    "float targets": ([([1], {"target_tokens": [1.0]})], "float32"),
    "unknown input": ([([1], {"target_tokens": [1], "mask": [1.0]})], "'mask'"),
    "other shape": ([([1, 2], {"target_tokens": [1, 2], "weights": [1.0]})], "weights"),
    "infinite": ([([1], {"target_tokens": [1], "weights": [float("nan")]})], "not finite"),
    "no tokens": ([([], {"target_tokens": [1]})], "empty"),
    "no data": ([], "no data"),
}


@pytest.mark.parametrize("case", list(BAD))
def test_bad_data_are_named_and_the_next_step_leaves_the_weights_alone(server, client, case):
    data, words = BAD[case]
    training = lora_client(client)
    before = matrices(server.service.model(training.model_id).trained)
    failed = result(server, send(server, encoded(training.model_id, 1, data)).json()["request_id"]).json()
    assert words in failed["error"] and failed["category"] == "user"
    good = send(server, encoded(training.model_id, 2, PLAIN)).json()["request_id"]
    step = server.post("/optim_step", model_id=training.model_id, seq_id=3, adam_params={}).json()["request_id"]
    assert "error" not in str(result(server, good).content)
    assert "a forward_backward before this step failed" in result(server, step).json()["error"]
    after = matrices(server.service.model(training.model_id).trained)
    assert all(torch.equal(before[name], after[name]) for name in before)


WRONG = {
    "loss": (lambda t: t.forward_backward([datum(TEXT)], "nonsense"), "there is no loss"),
    "stable": (lambda t: t.forward_backward([datum(TEXT)], "stable_reinforce"), "no public formula"),
    "option": (lambda t: t.forward_backward([datum(TEXT)], "cross_entropy", {"beta": 1.0}), "no option 'beta'"),
    "missing": (lambda t: t.forward_backward([datum(TEXT)], "ppo"), "'logprobs'"),
    "dimuon": (lambda t: t.optim_step(types.DimuonParams(learning_rate=0.1)), "dimuon"),
    "name": (lambda t: t.save_state("../up"), "cannot be a state's name"),
    "handle": (lambda t: t.forward_backward([datum(TEXT)], "custom", {"loss_id": "x"}), "not one of this session"),
    "recipients": (
        lambda t: t.save_weights_external("x", age_encryption_recipients=["age1x"]), "not encrypted here"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", list(WRONG))
def test_what_is_not_supported_is_refused_by_name(client, case):
    call, words = WRONG[case]
    with pytest.raises(tinker.RequestFailedError, match=words):
        call(lora_client(client)).result()


@pytest.mark.parametrize(
    "path",
    ["tinker://../../etc/weights/x", "tinker://s-1:train:0/weights/..", "tinker://s-1:train:0/other/x", "tinker://a/b"],
    ids=["run", "name", "kind", "short"],
)
def test_paths_stay_in_the_servers_folder(client, path):
    with pytest.raises(tinker.APIStatusError, match="not the path of a state"):
        client.create_sampling_client(model_path=path).result()


def test_another_base_and_unknown_fields_are_refused(server, client):
    with pytest.raises(tinker.RequestFailedError, match="this server has the model"):
        client.create_lora_training_client(base_model="other/model", rank=2).result()
    with pytest.raises(tinker.RequestFailedError, match="dimuon"):
        client.create_lora_training_client(
            base_model=NAME, rank=2, train_unembed=False, optimizer=types.DimuonOptimizerConfig()
        ).result()
    answer = server.post("/create_session", tags=[], sdk_version="1", surprise=1)
    assert answer.status_code == 400 and "surprise" in answer.json()["detail"]


def test_one_clients_fault_is_its_own_and_all_train_at_once(server, client):
    clients = [lora_client(client, seed=seed) for seed in range(4)]
    alone = lora_client(client, seed=2)
    data = [datum(TEXT, weights=1.0)]
    pending = []
    for number, each in enumerate(clients):
        bad = [types.Datum(model_input=types.ModelInput.from_ints([1]), loss_fn_inputs={"target_tokens": [5000]})]
        for _ in range(3):
            pending.append(each.forward_backward(bad if number == 1 else data, "cross_entropy"))
            pending.append(each.optim_step(types.AdamParams(learning_rate=0.01)))
    outcomes = []
    for each in pending:
        try:
            each.result()
            outcomes.append(True)
        except tinker.RequestFailedError:
            outcomes.append(False)
    assert outcomes == [True] * 6 + [False] * 6 + [True] * 12
    for _ in range(3):
        alone.forward_backward(data, "cross_entropy")
        alone.optim_step(types.AdamParams(learning_rate=0.01)).result()
    together, own = (matrices(server.service.model(each.model_id).trained) for each in (clients[2], alone))
    assert all(torch.equal(together[name], own[name]) for name in own), "in company or alone: the same bits"


def test_a_silent_clients_session_ends_and_frees_its_models(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("lockstep.train_server.service.EVERY_SECONDS", 0.05)
    with running(folder, tmp_path) as server:
        session = server.post("/create_session", tags=[], sdk_version="x").json()["session_id"]
        lora = {"rank": 2, "train_unembed": False}
        made = server.post(
            "/create_model", session_id=session, model_seq_id=0, base_model=NAME, lora_config=lora
        ).json()  # fmt: skip
        result(server, made["request_id"])
        path = server.post("/save_weights", model_id=made["model_id"], path="kept", seq_id=1).json()["request_id"]
        kept = result(server, path).json()["path"]
        sampler = server.post(
            "/save_weights_for_sampler", model_id=made["model_id"], seq_id=2, sampling_session_seq_id=0
        )
        result(server, sampler.json()["request_id"])
        assert len(server.service.engine.adapters) == 1
        server.service.config = replace(server.service.config, session_seconds=0.4)
        until = time.monotonic() + 60
        while server.service.sessions and time.monotonic() < until:
            time.sleep(0.02)
        gone = server.post("/session_heartbeat", session_id=session)
        assert gone.status_code == 410 and "was silent" in gone.json()["detail"]
        assert len(server.service.engine.adapters) == 0
        late = server.post("/optim_step", model_id=made["model_id"], seq_id=3, adam_params={})
        assert late.status_code == 410 and kept in late.json()["detail"]


REFUSED = {
    "rate": lambda t: t.optim_step(types.AdamParams(learning_rate=-1.0)),
    "beta": lambda t: t.optim_step(types.AdamParams(beta2=1.0)),
    "life": lambda t: t.save_weights_for_sampler("short", ttl_seconds=10),
    "name": lambda t: t.save_state("with a space"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_a_request_that_is_refused_leaves_no_gap(client, case):
    training = lora_client(client)
    with pytest.raises(tinker.RequestFailedError):
        REFUSED[case](training).result()
    assert training.forward([datum(TEXT)], "cross_entropy").result(timeout=20)


def test_requests_behind_one_that_does_not_arrive_go_on_and_the_step_fails(server, client, monkeypatch):
    monkeypatch.setattr(promises, "MISSING_SECONDS", 0.1)
    training = lora_client(client)
    second = send(server, encoded(training.model_id, 2, PLAIN)).json()["request_id"]
    assert "error" not in str(result(server, second).content)
    step = server.post("/optim_step", model_id=training.model_id, seq_id=3, adam_params={}).json()["request_id"]
    assert "request 1 has not arrived" in result(server, step).json()["error"]
    late = send(server, encoded(training.model_id, 1, PLAIN)).json()["request_id"]
    assert "after the ones that follow" in result(server, late).json()["error"]


def test_an_error_inside_the_server_is_an_answer(server, client, monkeypatch):
    training = lora_client(client)

    def fails(folder):
        raise ValueError("a bug")

    monkeypatch.setattr(server.service.model(training.model_id).trained, "save", fails)
    with pytest.raises(tinker.RequestFailedError, match="internal error"):
        training.save_state("never").result(timeout=20)
    assert training.forward([datum(TEXT)], "cross_entropy").result(timeout=20)


def test_more_samples_than_the_server_runs_are_refused(server, client):
    sampler = client.create_sampling_client(base_model=NAME).result()
    most = server.service.limits.max_sequences
    with pytest.raises(tinker.APIStatusError, match="--max-waiting"):
        sampler.sample(types.ModelInput.from_ints([1]), most + 1, types.SamplingParams(max_tokens=1)).result(timeout=20)


def test_a_sampler_of_an_overwritten_state_has_the_new_values_and_many_open_at_once(server, client):
    training = lora_client(client)
    prompt = types.ModelInput.from_ints(list(TEXT))
    path = training.save_state("same").result().path
    before = client.create_sampling_client(model_path=path).result().compute_logprobs(prompt).result()
    training.forward_backward([datum(TEXT)], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=0.1))
    assert training.save_state("same", overwrite=True).result().path == path
    opened = [client.create_sampling_client(model_path=path) for _ in range(6)]
    after = [each.result().compute_logprobs(prompt).result() for each in opened]
    assert all(each == after[0] for each in after) and after[0] != before


def test_snapshots_are_bounded_and_those_in_use_stay(server, client, monkeypatch):
    monkeypatch.setattr("lockstep.train_server.service.MOST_SNAPSHOTS", 3)
    training = lora_client(client)
    prompt = types.ModelInput.from_ints(list(TEXT))
    samplers = [training.save_weights_and_get_sampling_client().result() for _ in range(3)]
    samplers[0].compute_logprobs(prompt).result()
    for _ in range(2):
        samplers.append(training.save_weights_and_get_sampling_client().result())
        samplers[0].compute_logprobs(prompt).result()
    assert sum(name.startswith(training.model_id) for name in server.service.engine.adapters) == 3
    with pytest.raises(tinker.APIStatusError, match="save_weights_for_sampler"):
        samplers[1].compute_logprobs(prompt).result()


def test_few_bytes_that_name_large_tensors_are_refused(server, client):
    training = lora_client(client)
    request = wire.MESSAGES["ForwardBackwardRequest"](model_id=training.model_id, seq_id=1, loss_fn="cross_entropy")
    each = request.data.add()
    each.model_input.add().encoded_text.tokens = np.asarray([1], np.int32).tobytes()
    tensor = each.loss_fn_inputs["target_tokens"]
    tensor.dtype = wire.INT64
    tensor.sparse_csr.crow_indices = np.asarray([0, 0], np.int64).tobytes()
    for number, shape in enumerate(([1, 1 << 25], [1 << 62] * 60_000, [-1, 4]), 1):
        del tensor.shape[:]
        tensor.shape.extend(shape)
        request.seq_id = number
        answer = result(server, send(server, request.SerializeToString()).json()["request_id"]).json()
        assert "target_tokens" in answer["error"] and len(answer["error"]) < 300


def test_after_a_restart_a_client_is_told_its_newest_state_and_continues_from_it(folder, tmp_path):
    with running(folder, tmp_path) as server, server.client() as client:
        training = lora_client(client)
        training.save_state("one").result()
        path = training.save_state("two").result().path
        training.forward_backward([datum(TEXT)], "cross_entropy").result()
    with running(folder, tmp_path) as server:
        lost = send(server, encoded(training.model_id, 4, PLAIN))
        assert lost.status_code == 404 and path in lost.json()["detail"], "no status that the client repeats"
        unsaved = send(server, encoded("s-0:train:0", 1, PLAIN))
        assert unsaved.status_code == 404 and "it has no saved state" in unsaved.json()["detail"]
        with server.client() as client:
            assert client.create_training_client_from_state_with_optimizer(path).result().get_info().lora_rank == 4


def test_results_that_nobody_retrieves_are_dropped_beyond_a_bound(server, client, monkeypatch):
    monkeypatch.setattr(promises, "MOST_BYTES", 4000)
    training = lora_client(client)
    ids = [
        send(server, encoded(training.model_id, n, PLAIN, forward_only=True)).json()["request_id"] for n in range(1, 40)
    ]
    assert result(server, ids[-1]).status_code == 200
    gone = server.post("/retrieve_future", request_id=ids[0])
    assert gone.status_code == 404 and "left unretrieved" in gone.json()["detail"]


def test_a_cancelled_sample_frees_its_sequence(server, client):
    sampler = client.create_sampling_client(base_model=NAME).result()
    future = sampler.sample(types.ModelInput.from_ints([1, 2]), 2, types.SamplingParams(max_tokens=4000, stop=[]))
    limits, until = server.service.limits, time.monotonic() + 90
    while not limits.sequences and time.monotonic() < until:
        time.sleep(0.01)
    future.future().cancel()
    while (limits.sequences or server.service.engine.has_work) and time.monotonic() < until:
        time.sleep(0.01)
    assert limits.sequences == 0 and not server.service.engine.has_work


def test_a_full_folder_refuses_a_state_and_names_the_setting(folder, tmp_path):
    with running(folder, tmp_path, max_state_bytes=1000) as server, server.client() as client:
        with pytest.raises(tinker.RequestFailedError, match="--max-state-bytes"):
            lora_client(client).save_state("too-large").result()
        assert server.service.states.all() == [] and not [*tmp_path.glob("*/*/*")]


def test_a_damaged_state_is_refused(server, client):
    training = lora_client(client)
    path = training.save_state("whole").result().path
    _, folder = server.service.states.find(path)
    file = folder / "adapter_model.safetensors"
    values = bytearray(file.read_bytes())
    values[-1] ^= 1
    file.write_bytes(values)
    with pytest.raises(tinker.RequestFailedError, match="is damaged"):
        client.create_training_client_from_state(path).result()


def test_a_key_is_required_where_there_is_one(folder, tmp_path):
    with running(folder, tmp_path, api_key="tml-secret") as server:
        assert server.post("/create_session", tags=[], sdk_version="x").status_code == 401
        with tinker.ServiceClient(base_url=server.url, api_key="tml-secret") as client:
            lora_client(client)


def test_a_result_that_is_not_there_is_asked_for_again(server, client, monkeypatch):
    monkeypatch.setattr(app, "HOLD_SECONDS", 0.05)
    training = lora_client(client)
    waiting = send(server, encoded(training.model_id, 2, PLAIN)).json()["request_id"]
    assert server.post("/retrieve_future", request_id=waiting).status_code == 408
    later = training.forward([datum(TEXT)], "cross_entropy")
    assert log_probs(later.result())
    assert result(server, waiting).status_code == 200


def test_a_sample_that_ends_while_others_are_announced_is_announced_next(server, monkeypatch):
    session = server.post("/create_session", tags=[]).json()["session_id"]
    opened = server.post("/create_sampling_session", session_id=session, sampling_session_seq_id=1, base_model=NAME)
    sampler = opened.json()["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": list(TEXT)}]}
    drawn = {"sampling_session_id": sampler, "prompt": prompt, "sampling_params": {"max_tokens": 1}}
    first = server.post("/asample", **drawn, seq_id=1).json()["request_id"]
    held = app._held
    late = promises.Promise("late", session, result=promises.Result(b""))

    async def another_ends_meanwhile(*arguments):
        found = await held(*arguments)
        server.service.promises.completions((sampler, 0)).add(late)
        return found

    def announced(cursor):
        target = {"sampling_session_id": sampler}
        answer = server.post("/retrieve_futures", target=target, prev_cursor=cursor, timeout=20).json()
        return [each["request_id"] for each in answer["completions"]], answer["cursor"]

    with monkeypatch.context() as patch:
        patch.setattr(app, "_held", another_ends_meanwhile)
        names, cursor = announced(0)
    assert names == [first]
    assert announced(cursor)[0] == ["late"]
