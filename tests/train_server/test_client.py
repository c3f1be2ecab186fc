"""The released client against the server: training, sampling, saved states."""

import math

import pytest
import tinker
import torch
from tinker import types

from lockstep import score
from tests.train_server.conftest import NAME, datum, log_probs, lora_client, matrices

PROMPT = list(b"hello")
TEXTS = [b"3+4=7", b"the quick brown fox", b"one two three four"]


def model_of(server, client):
    return server.service.model(client.model_id).trained


def sampled(sampler, prompt=PROMPT, n=2, **params):
    params = types.SamplingParams(**({"max_tokens": 12, "seed": 5} | params))
    return sampler.sample(types.ModelInput.from_ints(prompt), n, params).result().sequences


def adam(rate=1e-2, **more):
    return types.AdamParams(learning_rate=rate, **more)


def test_capabilities_information_and_heartbeats(server, client):
    (model,) = (
        tinker.RestClient(base_url=server.url, api_key="tml-x").get_server_capabilities().result().supported_models
    )
    assert (model.model_name, model.max_context_length) == (NAME, 32768)
    training = lora_client(client, rank=2)
    info = training.get_info()
    assert (info.model_data.model_name, info.lora_rank, info.model_id) == (NAME, 2, training.model_id)
    session_id = training.model_id.partition(":")[0]
    assert server.post("/session_heartbeat", session_id=session_id).status_code == 200
    assert server.post("/telemetry", events=[{"event": "x"}]).status_code == 200


def test_a_model_learns_its_texts_and_samples_have_the_trainers_bits(server, client):
    training = lora_client(client)
    data = [datum(text, weights=1.0) for text in TEXTS]
    losses = []
    for _ in range(8):
        computed, updated = training.forward_backward(data, "cross_entropy"), training.optim_step(adam())
        losses.append(computed.result().metrics["loss:sum"])
        assert updated.result().metrics["grad_norm"] > 0
    assert losses[-1] < 0.95 * losses[0]
    sampler = training.save_weights_and_get_sampling_client().result()
    sequences = sampled(sampler, n=3)
    scored = training.forward([datum(PROMPT + each.tokens) for each in sequences], "cross_entropy").result()
    for each, own in zip(sequences, log_probs(scored)):
        assert each.logprobs == own[len(PROMPT) - 1 :], "the sampler's log-probabilities are the trainer's"
    again = sampled(sampler, n=3)
    assert [each.tokens for each in again] == [each.tokens for each in sequences]


def test_the_base_samples_and_scores_as_it_does_without_a_server(server, client):
    sampler = client.create_sampling_client(base_model=f"{NAME}:peft:32768").result()
    assert sampler.get_base_model() == f"{NAME}:peft:32768"
    (sequence,) = sampled(sampler, n=1)
    (expected,) = score(server.service.base, [PROMPT + sequence.tokens])
    assert sequence.logprobs == expected.tolist()[len(PROMPT) - 1 :]
    assert sampler.compute_logprobs(types.ModelInput.from_ints(PROMPT)).result() == [None, *expected.tolist()[:4]]


def test_samples_with_everything_that_can_be_asked(server, client):
    sampler = client.create_sampling_client(base_model=NAME).result()
    prompt = types.ModelInput.from_ints(PROMPT)
    params = types.SamplingParams(max_tokens=5, seed=1, temperature=0.7, top_k=9, top_p=0.9)
    answer = sampler.sample(
        prompt, 2, params, include_prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=2,
        prompt_logprobs_last_n=2, target_prompt_logprobs=types.TensorData.from_torch(
            torch.tensor([[7, -1], [8, 9], [-1, -1], [PROMPT[4], 0]])
        ),
    ).result()  # fmt: skip
    assert [len(each.tokens) for each in answer.sequences] == [5, 5]
    assert all(len(row) == 2 for each in answer.sequences for row in each.topk_logprobs)
    whole = sampler.compute_logprobs(prompt).result()
    assert answer.prompt_logprobs == [None, None, None, *whole[3:]]
    tops = answer.topk_prompt_logprobs
    assert tops[:3] == [None] * 3 and all(len(row) == 3 and row[0][1] >= row[1][1] for row in tops[3:])
    targets = answer.target_prompt_logprobs.to_torch()
    assert targets[0, 1] == targets[2, 0] == 0 and float(targets[3, 0]) == whole[4]


def test_stops_are_tokens_texts_or_none_at_all(client):
    sampler = client.create_sampling_client(base_model=NAME).result()
    (free,) = sampled(sampler, n=1, max_tokens=30)
    token = free.tokens[3]
    first = free.tokens.index(token)
    (stopped,) = sampled(sampler, n=1, max_tokens=30, stop=[token])
    assert stopped.tokens == free.tokens[: first + 1] and stopped.stop_reason == "stop"
    (until,) = sampled(sampler, n=1, max_tokens=30, stop=[])
    assert len(until.tokens) == 30 and until.stop_reason == "length"


def test_each_loss_is_the_documented_one(client):
    training = lora_client(client, rank=2)
    text = b"abcdefgh"
    sampler_side = [-3.0, -4.0, -5.0, -6.0, -5.5, -4.5, -6.5]
    advantages = [0.0, 1.0, -1.0, 2.0, -0.5, 0.25, 1.5]
    (p,) = log_probs(training.forward([datum(text)], "cross_entropy").result())
    p, q, a = (torch.tensor(each, dtype=torch.float64) for each in (p, sampler_side, advantages))
    ratio = (p - q).exp()
    marked = torch.tensor([0.0, 0, 1, 1, 1, 1, 1])
    mean = ((p - q) * marked).sum() / marked.sum()
    expected = {
        "cross_entropy": (-(p * a).sum(), {}, {"weights": advantages}),
        "importance_sampling": (-(ratio * a).sum(), {}, {}),
        "ppo": (-torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).sum(), {}, {}),
        "cispo": (-(ratio.clamp(0.5, 2.0) * p * a).sum(), {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}, {}),
        "dro": (-(p * a - 0.5 * 0.3 * (p - q) ** 2).sum(), {"beta": 0.3}, {}),
        "gspo": (
            -torch.minimum(mean.exp() * a, mean.exp().clamp(0.8, 1.2) * a).sum(),
            {},
            {"sequence_ratio_mask": marked.tolist()},
        ),
    }
    for name, (value, options, more) in expected.items():
        ratios = {} if name == "cross_entropy" else {"logprobs": sampler_side, "advantages": advantages}
        found = training.forward([datum(text, **ratios, **more)], name, options).result()
        assert math.isclose(found.metrics["loss:sum"], float(value), rel_tol=2e-6), name  # of float32
        assert torch.equal(torch.tensor(log_probs(found)[0], dtype=torch.float64), p)


def test_gradients_of_several_requests_add_up_and_a_step_clears_them(server, client):
    one, two = lora_client(client, seed=9), lora_client(client, seed=9)
    data = [datum(text, weights=1.0) for text in TEXTS]
    one.forward_backward(data, "cross_entropy")
    for each in data:
        two.forward_backward([each], "cross_entropy")
    settings = adam(weight_decay=0.1, grad_clip_norm=0.5, beta1=0.8)
    first, second = one.optim_step(settings).result(), two.optim_step(settings).result()
    assert math.isclose(first.metrics["grad_norm"], second.metrics["grad_norm"], rel_tol=1e-4)  # other sums
    before = matrices(model_of(server, one))
    one.optim_step(adam()).result()
    after = matrices(model_of(server, one))
    assert all(torch.equal(before[name], after[name]) for name in before), "a step without gradients changes nothing"


def test_several_and_sparse_targets_of_a_token(client):
    training = lora_client(client, rank=2)
    tokens = list(b"abcdef")
    targets = torch.tensor([[each, each + 1, 0] for each in tokens[1:]])
    weights = torch.tensor([[0.5, 0.25, 0.0]] * 5)

    def output(targets, weights):
        given = {"target_tokens": targets, "weights": weights}
        data = [types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=given)]
        return training.forward_backward(data, "cross_entropy").result()

    dense = output(types.TensorData.from_torch(targets), types.TensorData.from_torch(weights))
    (plain,) = log_probs(training.forward([datum(tokens)], "cross_entropy").result())
    (found,) = log_probs(dense)
    assert [row[0] for row in found] == plain
    assert math.isclose(dense.metrics["loss:sum"], -sum(0.5 * r[0] + 0.25 * r[1] for r in found), rel_tol=1e-6)
    sparse = types.TensorData(
        data=[0.5, 0.25] * 5, dtype="float32", shape=[5, 3], sparse_crow_indices=[0, 2, 4, 6, 8, 10],
        sparse_col_indices=[0, 1] * 5,
    )  # fmt: skip
    assert output(types.TensorData.from_torch(targets), sparse).metrics == dense.metrics


def test_a_snapshot_keeps_its_values_and_an_inflight_client_follows(server, client):
    training = lora_client(client, seed=11)
    kept = training.save_weights_and_get_sampling_client().result()
    flying = training.save_weights_and_get_sampling_client(kind="inflight").result()
    shared = {each.data_ptr() for each in model_of(server, training).adapter.parameters()}
    engine = server.service.engine
    snapshot = next(each for name, each in engine.adapters.items() if name.startswith(f"{training.model_id}/0/"))
    assert {each.data_ptr() for each in snapshot.parameters()} == shared, "nothing is copied for a snapshot"
    before, values = sampled(kept), [each.detach().clone() for each in snapshot.parameters()]
    training.forward_backward([datum(TEXTS[1], weights=1.0)], "cross_entropy")
    training.optim_step(adam(0.1)).result()
    assert all(map(torch.equal, snapshot.parameters(), values)), "not only what the engine has packed"
    assert [each.logprobs for each in sampled(kept)] == [each.logprobs for each in before]
    assert [each.logprobs for each in sampled(flying)] == [each.logprobs for each in before]
    training.save_weights_and_get_sampling_client(kind="inflight").result()
    assert [each.logprobs for each in sampled(flying)] != [each.logprobs for each in before]


def test_a_saved_state_continues_bit_for_bit_with_its_optimizer_and_is_sampled(server, client):
    training = lora_client(client, rank=3)
    data = [datum(text, weights=1.0) for text in TEXTS]
    training.forward_backward(data, "cross_entropy")
    training.optim_step(adam())
    path = training.save_state("first", user_metadata={"a": "b"}).result().path
    assert path == f"tinker://{training.model_id}/weights/first"
    saved = training.save_weights_for_sampler("for-sampler").result().path
    other = client.create_training_client_from_state_with_optimizer(path).result()
    fresh = client.create_training_client_from_state(path).result()
    for each in (training, other, fresh):
        each.forward_backward(data, "cross_entropy")
        each.optim_step(adam()).result()
    values = [matrices(model_of(server, each)) for each in (training, other, fresh)]
    assert all(torch.equal(values[0][name], values[1][name]) for name in values[0])
    assert any(not torch.equal(values[0][name], values[2][name]) for name in values[0]), "moments start anew"
    sampler = client.create_sampling_client(model_path=saved).result()
    scored = client.create_training_client_from_state(path).result()
    (sequence,) = sampled(sampler, n=1)
    (own,) = log_probs(scored.forward([datum(PROMPT + sequence.tokens)], "cross_entropy").result())
    assert sequence.logprobs == own[len(PROMPT) - 1 :]


def test_a_traced_loss_runs_on_the_server_with_the_result_it_has_on_the_client(client):
    def loss(logprobs, advantages):
        ratio = torch.exp(logprobs - logprobs.detach())
        value = -(torch.clamp(ratio, 0.5, 1.5) * advantages).sum() + 0.1 * (logprobs**2).mean()
        return value, {"custom/mean:mean": logprobs.mean(), "custom/count:sum": torch.ones_like(logprobs).sum()}

    handle = client.create_custom_loss(loss, {"logprobs": 1, "advantages": 1}).result()
    assert handle.loss_id
    data = [datum(text, advantages=0.5) for text in TEXTS]
    here, there = lora_client(client, seed=21), lora_client(client, seed=21)
    served = there.forward_backward_custom(data, handle).result()

    def on_client(data, log_probs):
        values = [loss(own, each.loss_fn_inputs["advantages"].to_torch())[0] for each, own in zip(data, log_probs)]
        return sum(values), {}

    own = here.forward_backward_custom(data, on_client).result()
    assert math.isclose(served.metrics["loss:sum"], own.metrics["loss:sum"], rel_tol=1e-5)
    assert served.metrics["custom/count:sum"] == sum(len(text) - 1 for text in TEXTS)
    norms = [each.optim_step(adam()).result().metrics["grad_norm"] for each in (here, there)]
    assert math.isclose(*norms, rel_tol=1e-4)


def test_runs_and_states_are_listed_described_renewed_and_deleted(server, client):
    rest = tinker.RestClient(base_url=server.url, api_key="tml-x")
    training = lora_client(client, rank=5)
    path = training.save_state("kept", ttl_seconds=7200).result().path
    (found,) = rest.list_checkpoints(training.model_id).result().checkpoints
    assert (found.tinker_path, found.checkpoint_type) == (path, "training") and found.expires_at is not None
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    (found,) = rest.list_checkpoints(training.model_id).result().checkpoints
    assert found.expires_at is None and found.size_bytes > 0
    assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 5
    run = rest.get_training_run(training.model_id).result()
    assert run.last_checkpoint.tinker_path == path and run.lora_rank == 5
    assert training.model_id in [each.training_run_id for each in rest.list_training_runs().result().training_runs]
    exported = training.save_weights_external("out").result().path
    urls = rest.get_external_weights_urls(exported).result().urls
    assert set(urls) == {"adapter_config.json", "adapter_model.safetensors"}
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert path not in [each.tinker_path for each in rest.list_user_checkpoints().result().checkpoints]


@pytest.mark.parametrize("kept", [True, False], ids=["copied", "deleted"])
def test_a_copy_lives_on_its_own(server, client, kept):
    rest = tinker.RestClient(base_url=server.url, api_key="tml-x")
    training = lora_client(client, rank=2)
    path = training.save_state("source").result().path
    copied = rest.copy_weights(path, "any").result()
    if not kept:
        rest.delete_checkpoint_from_tinker_path(path).result()
    assert client.create_training_client_from_state(copied).result().get_info().lora_rank == 2
