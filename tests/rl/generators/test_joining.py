"""Which generators may sample for a run, and what they do for it; over real connections, without a trainer."""

import contextlib
import threading

import pytest
import torch

from lockstep import Completion, Engine, SamplingParams
from lockstep.checkpoint import load_model
from lockstep.config import ActorsConfig, CompileConfig, EngineConfig, ParallelConfig
from lockstep.errors import UserError
from lockstep.model import arithmetic_of, build_model, preset, read_config, save_model
from lockstep.parallel import open_world
from lockstep.rl.generators.channel import Closed, Listener, call
from lockstep.rl.generators.pool import GeneratorPool
from lockstep.rl.generators.pool_sampler import PoolSampler
from lockstep.rl.generators.process import run_generator
from lockstep.rl.generators.supervisor import GeneratorSupervisor
from lockstep.rl.rollouts.plain import plain_shape
from lockstep.rl.weights.server import WeightServer
from tests.rl.generators.peers import hello, join, plain, registry_of, wait_until
from tests.rl.processes import running

KEY = bytes(range(32))
ENGINE = EngineConfig(max_tokens_per_step=64, max_sequences=4, cache_tokens=1024)


@pytest.fixture
def world():
    return open_world(ParallelConfig(), "cpu")


def registry_for(folder, **changes):
    """A pool that generators of the folder's model may join, and the port."""
    welcome = dict(
        model=str(folder), shape=plain_shape(read_config(folder)), dtype="bfloat16", reduction_chunks=1,
        arithmetic=arithmetic_of(torch.device("cpu")), engine=vars(ENGINE), compile=vars(CompileConfig()),
        silence_seconds=5.0, on_update="continue", host="here", pid=1,
    )  # fmt: skip
    return registry_of(KEY, **(welcome | changes))


@contextlib.contextmanager
def running_generator(folder, model, world, **welcome):
    """A pool with a generator that has weights of version 1, and the weight server."""
    weight_server = WeightServer(dict(model.named_parameters()), torch.bfloat16, world, KEY)
    codes = []
    with registry_for(folder, **welcome) as (pool, port):
        run = threading.Thread(
            target=lambda: codes.append(run_generator(f"127.0.0.1:{port}", KEY, "", world)), daemon=True
        )
        run.start()
        pool.load_weights(weight_server.publish(1))
        pool.wait_for_weights()
        yield pool, weight_server
    run.join(20)
    weight_server.close()
    assert codes == [0] and not pool.names


@pytest.fixture(scope="module")
def model(model_folder):
    return load_model(model_folder, dtype="bfloat16", device="cpu")


def test_a_generator_joins_samples_with_the_bits_of_an_engine_and_ends_with_the_run(model_folder, model, world):
    prompts = [[1, 2, 3], [4, 5]]
    params = SamplingParams(n=3, max_tokens=12, seed=7, ignore_eos=True, top_p=0.9)
    with running_generator(model_folder, model, world) as (pool, _):
        groups = PoolSampler(pool).generate(prompts, params)
        assert pool.ready == ["generator_0"]
        # A sample whose last token ends it, but whose end has not been reported.
        last = Completion([9, model.config.eos_token_ids[0]], [-1.0, -1.0], "abort", versions=[1, 1])
        request = pool.begin([1, 2], SamplingParams(max_tokens=12, seed=7), [last])
        wait_until(lambda: not request.unfinished)
    assert request.samples[0].finish_reason == "stop" and request.samples[0].token_ids == last.token_ids
    assert plain(groups) == plain(Engine(model, ENGINE).generate(prompts, params))
    assert {version for group in groups for c in group for version in c.versions} == {1}


@pytest.mark.parametrize(
    ("key", "welcome", "message"),
    [
        (bytes(32), {}, "no run can be joined at '127.0.0.1:.*: the keys of the two sides differ"),
        (KEY, {"arithmetic": "cuda"}, "the trainer computes in cuda, but a generator on .* in "),
        (KEY, {"model": "other"}, "differs from the trainer's model: family llama3 and not qwen3"),
        (KEY, {"model": "nowhere"}, "nowhere"),
    ],
    ids=["key", "arithmetic", "model", "folder"],
)
def test_a_generator_that_does_not_fit_is_told_why(model_folder, world, tmp_path, key, welcome, message):
    if "model" in welcome:
        save_model(build_model(preset("llama3:micro", 512), dtype="bfloat16", seed=1), tmp_path / "other")
        welcome = {"model": str(tmp_path / welcome["model"])}
    with registry_for(model_folder, **welcome) as (pool, port):
        pool.required = {"generator_0"}
        with pytest.raises(UserError, match=message) as error:
            run_generator(f"127.0.0.1:{port}", key, "generator_0", world)
        if welcome:  # one that the run has started itself ends it, with the same sentence
            with pytest.raises(UserError, match="generator_0: ") as failure:
                PoolSampler(pool).generate([[1]], SamplingParams())
            assert str(error.value) in str(failure.value)


def test_a_generator_is_lost_when_any_of_its_ranks_is_silent_or_gone(model_folder):
    with registry_for(model_folder, silence_seconds=0.2) as (pool, port):

        def ranks(name, **changes):
            first = join(port, KEY, name=name, tensor=2, **changes)[0]
            second = call("127.0.0.1", port, KEY)
            second.send(hello(generator=name, rank=1, **changes))
            return first, second

        first, second = ranks("silent", place="elsewhere")
        with contextlib.suppress(Closed):  # when it has been given up
            for _ in range(20):
                first.send({"kind": "alive"})
                threading.Event().wait(0.05)
        wait_until(lambda: not pool.names)
        first, second = ranks("gone", place="elsewhere")
        second.close()
        wait_until(lambda: not pool.names)
        # One whose process still runs on this host is only slow.
        first, second = ranks("busy")
        threading.Event().wait(0.6)
        assert pool.names == ["busy"]
        first.close()
        wait_until(lambda: not pool.names)


def test_the_tokens_of_a_sample_go_with_its_request_to_the_next_generator(model_folder):
    new = {"token_ids": [7, 8], "logprobs": [-0.5, -1 / 3], "truncated_logprobs": [], "versions": [0, 0], "routes": []}
    begun = {**new, "finish_reason": None}
    with registry_for(model_folder, silence_seconds=30.0) as (pool, port):
        pool.load_weights({"version": 0})
        request = pool.begin([1], SamplingParams(n=2, seed=3)).id
        for name in ("first", "second"):
            channel, _ = join(port, KEY, name=name)
            channel.send({"kind": "has_weights", "version": 0})
            assert channel.receive(10)[0]["kind"] == "weights"
            message = channel.receive(10)[0]
            assert message["kind"] == "request" and message["id"] == request and message["prompt"] == [1]
            if name == "first":
                channel.send({"kind": "tokens", "samples": [[request, 1, begun]]})
                channel.send({"kind": "leaves", "why": "it received a signal, and leaves"})
        assert message["begun"] == [{key: [] for key in new} | {"finish_reason": None}, begun]


def test_a_generator_that_never_starts_ends_the_run_and_its_log_is_quoted(tmp_path, monkeypatch):
    (tmp_path / "lockstep").mkdir()
    (tmp_path / "lockstep" / "__init__.py").write_text("raise RuntimeError('this environment is damaged')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    pool = GeneratorPool(512, 1024, 60.0)
    actors = ActorsConfig(generators=1, threads=1)
    supervisor = GeneratorSupervisor(actors, pool, "127.0.0.1:1", KEY, "", tmp_path / "logs")
    with supervisor, pytest.raises(UserError) as stopped:
        pool.wait_for_weights()
    assert "generator_0 exited with code 1 before it could sample, 3 times in a row" in str(stopped.value)
    log = f"{tmp_path}/logs/generator_0.log"
    assert f"{log} ends with: RuntimeError: this environment is damaged." in str(stopped.value)


@pytest.mark.parametrize(
    ("on_update", "prompt", "tokens", "versions"),
    [
        ("finish", 3, 60, {1}),
        ("continue", 200, 20, {1}),  # less work than new weights, with which all would be computed again
        ("continue", 3, 100, {1, 2}),
    ],
)
def test_samples_in_flight_are_finished_before_new_weights_as_on_update_says(
    model_folder, model, world, on_update, prompt, tokens, versions
):
    params = SamplingParams(max_tokens=tokens, seed=1, ignore_eos=True)
    with running_generator(model_folder, model, world, on_update=on_update) as (pool, weight_server):
        # The weights come when the first request has begun, with nearly all of it to go.
        first = pool.begin([5] * prompt, params)
        pool.load_weights(weight_server.publish(2))
        second = pool.begin([5] * prompt, params)
        wait_until(lambda: not first.unfinished and not second.unfinished)
        metrics = pool.metrics()
    found = set(first.samples[0].versions)
    assert found <= versions and max(found) == max(versions)
    assert set(second.samples[0].versions) == {2}
    by_key = {key.split("/")[-1]: value for key, value in metrics.items()}
    assert by_key["held"] == 0 and by_key["prefill_seconds"] > 0 and by_key["decode_seconds"] > 0
    if on_update == "finish":  # the second has waited behind the weights, for 60 tokens of the first
        assert by_key["queue_seconds"] > by_key["decode_seconds"] / 4


def test_a_generator_of_the_run_that_sent_invalid_data_is_ended_and_not_restarted(tmp_path):
    pool = GeneratorPool(512, 1024, 60.0)
    # It calls, and nobody answers.
    with contextlib.closing(Listener(KEY)) as listener:
        address = "{}:{}".format(*listener.address)
        actors = ActorsConfig(generators=1, threads=1)
        with GeneratorSupervisor(actors, pool, address, KEY, "", tmp_path / "logs"):
            wait_until(lambda: running(address))
            pool.banned.add("generator_0")
            wait_until(lambda: not running(address))
            threading.Event().wait(0.3)
            assert not running(address)
