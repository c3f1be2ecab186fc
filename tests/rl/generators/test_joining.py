"""Who may sample for a run and who may not, each said in a sentence; over real connections, without a trainer."""

import contextlib
import os
import threading

import pytest
import torch

import lockstep.rl.generators.process as generator_module
import lockstep.rl.generators.supervisor as supervisor_module
from lockstep import Completion, Engine, SamplingParams
from lockstep.checkpoint import load_model
from lockstep.config import ActorsConfig, CompileConfig, EngineConfig, ParallelConfig, RLConfig
from lockstep.errors import UserError
from lockstep.model import arithmetic_of, build_model, preset, read_config, save_model
from lockstep.observe.heartbeat import host as place
from lockstep.parallel import open_world
from lockstep.rl.generators.channel import Closed, Listener, call
from lockstep.rl.generators.channel_remote import ChannelRemote
from lockstep.rl.generators.open import generator_spec
from lockstep.rl.generators.pool import GeneratorPool
from lockstep.rl.generators.process import run_generator
from lockstep.rl.generators.registry import GeneratorRegistry
from lockstep.rl.generators.separate import KEY as KEY_FILE
from lockstep.rl.generators.separate import SeparateGenerators
from lockstep.rl.generators.supervisor import GeneratorSupervisor
from lockstep.rl.rollouts.plain import plain_shape
from lockstep.rl.weights.server import WeightServer
from tests.rl.generators.liars import Generator, honest
from tests.rl.generators.test_pool import wait_until

KEY = bytes(range(32))
ENGINE = EngineConfig(max_tokens_per_step=64, max_sequences=4, cache_tokens=1024)


@pytest.fixture
def world():
    return open_world(ParallelConfig(), "cpu")


def welcome_of(folder, **changes):
    plain = dict(
        model=str(folder), shape=plain_shape(read_config(folder)), dtype="bfloat16", reduction_chunks=1,
        arithmetic=arithmetic_of(torch.device("cpu")), engine=vars(ENGINE), compile=vars(CompileConfig()),
        silence_seconds=5.0, on_update="continue", host="here", pid=1,
    )  # fmt: skip
    return plain | changes


def registry_of(pool, welcome):
    listener = Listener(KEY)
    return GeneratorRegistry(pool, listener, welcome, capacity=4), "{}:{}".format(*listener.address)


def test_a_generator_joins_samples_and_is_let_go(model_folder, world):
    model = load_model(model_folder, dtype="bfloat16", device="cpu")
    weight_server = WeightServer(dict(model.named_parameters()), torch.bfloat16, world, KEY)
    pool = GeneratorPool(512, 1024, 60.0)
    registry, address = registry_of(pool, welcome_of(model_folder))
    prompts = [[1, 2, 3], [4, 5]]
    params = SamplingParams(n=3, max_tokens=12, seed=7, ignore_eos=True, top_p=0.9)
    codes = []
    with registry:
        run = threading.Thread(target=lambda: codes.append(run_generator(address, KEY, "", world)), daemon=True)
        run.start()
        pool.load_weights(weight_server.publish(1))
        pool.wait_for_weights()
        groups = pool.generate(prompts, params)
        assert pool.ready == ["generator_0"]
    run.join(20)
    weight_server.close()
    expected = Engine(model, ENGINE).generate(prompts, params)
    assert [[(c.token_ids, c.logprobs, c.truncated_logprobs, c.finish_reason) for c in group] for group in groups] == [
        [(c.token_ids, c.logprobs, c.truncated_logprobs, c.finish_reason) for c in group] for group in expected
    ]
    assert {version for group in groups for c in group for version in c.versions} == {1}
    assert codes == [0] and not pool.names


@pytest.mark.parametrize(
    ("key", "version", "changes", "said"),
    [
        (bytes(32), "", {}, "no trainer can be reached at '127.0.0.1:.*: it"),
        (KEY, "0.0.0", {}, "install the same version on both sides"),
        (KEY, "", {"arithmetic": "cuda"}, "the trainer computes in cuda, but a generator on .* in "),
        (KEY, "", {"model": "other"}, "differs from the trainer's model: intermediate_size .* and not"),
        (KEY, "", {"model": "nowhere"}, "nowhere"),
    ],
    ids=["key", "version", "arithmetic", "model", "folder"],
)
def test_who_does_not_fit_is_told_why(model_folder, world, tmp_path, monkeypatch, caplog, key, version, changes, said):
    if changes.get("model") == "other":
        shape = preset("llama3:micro", 512)
        save_model(build_model(shape, dtype="bfloat16", seed=1), tmp_path / "other")
        said = "differs from the trainer's model: family llama3 and not qwen3"
    if "model" in changes:
        changes = {"model": str(tmp_path / changes["model"])}
    if version:
        monkeypatch.setattr(generator_module, "__version__", version)
    pool = GeneratorPool(512, 1024, 60.0)
    pool.required = {"generator_0"}
    registry, address = registry_of(pool, welcome_of(model_folder, **changes))
    with registry:
        with pytest.raises(UserError, match=said) as error:
            run_generator(address, key, "generator_0", world)
        if changes:  # one that the run has started itself ends it, with the same sentence
            with pytest.raises(UserError, match="generator_0: ") as failure:
                pool.generate([[1]], SamplingParams())
            assert str(error.value) in str(failure.value)


def test_of_a_generator_every_rank_is_heard(model_folder):
    pool = GeneratorPool(512, 1024, 60.0)
    registry, address = registry_of(pool, welcome_of(model_folder, silence_seconds=0.5))
    host, port = address.split(":")
    hello = {"lockstep": generator_module.__version__, "host": "here", "pid": 1, "place": "elsewhere"}

    def channels(name):
        first, second = call(host, int(port), KEY), call(host, int(port), KEY)
        first.send(hello | {"name": name, "tensor": 2})
        assert first.receive(10)[0]["name"] == name
        second.send(hello | {"generator": name, "rank": 1})
        return first, second

    with registry:
        talking, beside = channels("silent")
        with contextlib.suppress(Closed):  # when it has been given up
            for _ in range(20):
                talking.send({"kind": "alive"})
                threading.Event().wait(0.1)
        wait_until(lambda: not pool.names)
        assert not pool.names  # though its first rank has gone on to say that it lives
        talking, beside = channels("gone")
        beside.close()
        wait_until(lambda: not pool.names)
        talking, beside = channels("silent at once")
        wait_until(lambda: not pool.names)
        # One that the kernel of this host says still runs has only not got to speak.
        hello |= {"pid": os.getpid(), "place": place()}
        talking, beside = channels("busy")
        threading.Event().wait(1.5)
        assert pool.names == ["busy"]
        talking.close()
        wait_until(lambda: not pool.names)


def test_what_is_known_of_samples_goes_with_the_request(model_folder):
    pool = GeneratorPool(512, 1024, 60.0)
    registry, address = registry_of(pool, welcome_of(model_folder, silence_seconds=30.0))
    host, port = address.split(":")
    new = {"token_ids": [7, 8], "logprobs": [-0.5, -1 / 3], "truncated_logprobs": [], "versions": [0, 0], "routes": []}
    begun = {**new, "finish_reason": None}
    with registry:
        request = pool.add([1], SamplingParams(n=2, seed=3))
        for name in ("first", "second"):
            channel = call(host, int(port), KEY)
            channel.send(
                {
                    "lockstep": generator_module.__version__,
                    "host": "here",
                    "pid": 1,
                    "place": "elsewhere",
                    "tensor": 1,
                    "name": name,
                }
            )
            channel.receive(10)
            wait_until(lambda: name in pool.names)  # noqa: B023
            channel.send({"kind": "has_weights", "version": 0})
            asked = channel.receive(10)[0]
            assert asked["kind"] == "request" and asked["id"] == request and asked["prompt"] == [1]
            if name == "first":
                channel.send({"kind": "tokens", "samples": [[request, 1, begun]]})
                channel.send({"kind": "leaves", "why": "it received a signal, and leaves"})
        assert asked["begun"] == [{key: [] for key in new} | {"finish_reason": None}, begun]


def test_a_generator_that_never_starts_ends_the_run_and_its_log_is_quoted(tmp_path, monkeypatch):
    (tmp_path / "tyro.py").write_text("raise RuntimeError('this environment is damaged')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:.")
    pool = GeneratorPool(512, 1024, 60.0)
    pool.load_weights({"version": 1})
    actors = ActorsConfig(generators=1, threads=1)
    supervisor = GeneratorSupervisor(actors, pool, "127.0.0.1:1", KEY, "", tmp_path / "logs")
    with supervisor, pytest.raises(UserError) as stopped:
        pool.generate([[1]], SamplingParams())
    assert "generator_0 exited with code 1 before it could sample, 3 times in a row" in str(stopped.value)
    assert f"{tmp_path}/logs/generator_0.log ends with: RuntimeError: this environment is damaged." in str(
        stopped.value
    )


@pytest.mark.parametrize(
    ("on_update", "prompt", "tokens", "versions"),
    [
        ("finish", 3, 60, {1}),
        ("continue", 200, 20, {1}),  # less to go than new weights would have computed anew
        ("continue", 3, 100, {1, 2}),
    ],
)
def test_what_a_generator_has_begun_is_finished_before_new_weights_where_it_should_be(
    model_folder, world, on_update, prompt, tokens, versions
):
    model = load_model(model_folder, dtype="bfloat16", device="cpu")
    weight_server = WeightServer(dict(model.named_parameters()), torch.bfloat16, world, KEY)
    pool = GeneratorPool(512, 1024, 60.0)
    registry, address = registry_of(pool, welcome_of(model_folder, on_update=on_update))
    params = SamplingParams(max_tokens=tokens, seed=1, ignore_eos=True)
    with registry:
        run = threading.Thread(target=lambda: run_generator(address, KEY, "", world), daemon=True)
        run.start()
        pool.load_weights(weight_server.publish(1))
        pool.wait_for_weights()
        # One after the other: the weights come when the first request has begun, and has nearly all to go.
        first = pool.begin([5] * prompt, params)
        pool.load_weights(weight_server.publish(2))
        second = pool.begin([5] * prompt, params)
        found = [set(group[0].versions) for group in pool.complete([first, second])]
        metrics = pool.metrics()
    run.join(20)
    weight_server.close()
    assert found[0] <= versions and max(found[0]) == max(versions)
    assert found[1] == {2}
    by_key = {key.split("/")[-1]: value for key, value in metrics.items()}
    assert by_key["held"] == 0 and by_key["prefill_seconds"] > 0 and by_key["decode_seconds"] > 0
    if on_update == "finish":  # the second has waited behind the weights, for 60 tokens of the first
        assert by_key["queue_seconds"] > 0.02


def test_a_sample_whose_end_nobody_has_told_is_ended_by_the_next_generator(model_folder, world):
    model = load_model(model_folder, dtype="bfloat16", device="cpu")
    weight_server = WeightServer(dict(model.named_parameters()), torch.bfloat16, world, KEY)
    pool = GeneratorPool(512, 1024, 60.0)
    registry, address = registry_of(pool, welcome_of(model_folder))
    last = Completion([9, model.config.eos_token_ids[0]], [-1.0, -1.0], "abort", versions=[1, 1])
    with registry:
        run = threading.Thread(target=lambda: run_generator(address, KEY, "", world), daemon=True)
        run.start()
        pool.load_weights(weight_server.publish(1))
        pool.wait_for_weights()
        request = pool.begin([1, 2], SamplingParams(max_tokens=12, seed=7), [last])
        wait_until(lambda: not request.unfinished)
    run.join(20)
    weight_server.close()
    assert request.samples[0].finish_reason == "stop" and request.samples[0].token_ids == last.token_ids


def test_a_generator_of_the_runs_own_that_says_what_cannot_be_so_is_ended_and_not_started_again(tmp_path):
    pool = GeneratorPool(512, 1024, 60.0)
    # They call, and nobody answers them.
    with contextlib.closing(Listener(KEY)) as listener:
        address = "{}:{}".format(*listener.address)
        actors = ActorsConfig(generators=1, threads=1)
        with GeneratorSupervisor(actors, pool, address, KEY, "", tmp_path / "logs") as local:
            wait_until(lambda: local.processes()["generator_0"])
            (process,) = local.processes()["generator_0"]
            pool.banned.add("generator_0")
            wait_until(lambda: not os.path.exists(f"/proc/{process}"))
            threading.Event().wait(0.5)
            assert local.processes() == {"generator_0": []}


def test_a_generator_that_the_run_has_told_to_end_is_not_started_again(
    model_folder, world, tmp_path, monkeypatch, caplog
):
    with contextlib.closing(Listener(KEY)) as free:
        port = free.address[1]
    actors = ActorsConfig(generators=1, threads=1, port=port)
    config = RLConfig(model=str(model_folder), dtype="bfloat16", actors=actors)
    model = load_model(model_folder, dtype="bfloat16", device="cpu")
    closed = ChannelRemote.close

    def slowly(self):
        closed(self)
        threading.Event().wait(0.5)  # as where several are told one after the other

    monkeypatch.setattr(ChannelRemote, "close", slowly)
    monkeypatch.setattr(supervisor_module, "END_SECONDS", 0.1)
    (tmp_path / "logs").mkdir()
    with SeparateGenerators(generator_spec(config, model, world), actors, model, world, tmp_path) as generators:
        # It comes before the process that the run has started, under its name.
        Generator(port, bytes.fromhex((tmp_path / "logs" / KEY_FILE).read_text()), honest, name="generator_0")
        wait_until(lambda: generators.sampler.names == ["generator_0"])
        threading.Event().wait(0.3)  # the supervisor has seen it
    assert not caplog.messages
