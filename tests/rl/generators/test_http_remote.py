"""Generators behind HTTP, over real servers: the tokens of a local engine, what is refused, and what is lost."""

import contextlib
import dataclasses
import json
import re
import socket
import threading

import pytest
import torch

from lockstep.config import CompileConfig, EngineConfig
from lockstep.errors import UserError
from lockstep.generate import Completion, Engine, SamplingParams
from lockstep.model import build_model, load_model, preset, save_model
from lockstep.model.arithmetic import arithmetic_of
from lockstep.parallel import World
from lockstep.rl.generators.http_remote import HttpRemote, ServerSupervisor
from lockstep.rl.generators.http_servers import HttpClient, LockstepServer, find_server, owner_of
from lockstep.rl.generators.pool import GeneratorPool
from lockstep.rl.generators.pool_sampler import PoolSampler
from lockstep.rl.generators.spec import GeneratorSpec
from lockstep.rl.weights.folders import WeightFolders
from tests.rl.generators.peers import plain, wait_until
from tests.server.conftest import running_server

ENGINE = EngineConfig(max_tokens_per_step=512, max_sequences=16, cache_tokens=16384)
PROMPTS = [[5, 6, 7], [300, 2, 41, 8, 9, 10], [77]]
PARAMS = SamplingParams(max_tokens=40, n=3, temperature=0.9, stop_token_ids=tuple(range(11, 25)), ignore_eos=True)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, bpe_tokenizer):
    folder = tmp_path_factory.mktemp("served")
    config = dataclasses.replace(preset("qwen3:micro", bpe_tokenizer.vocab_size, (0,)), max_positions=512)
    save_model(build_model(config, dtype="float32", seed=1), folder)
    bpe_tokenizer.save(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


@pytest.fixture(scope="module")
def server(folder):
    with running_server(folder, admin_key="secret", engine=ENGINE) as running:
        yield running


@pytest.fixture(autouse=True)
def admin_key(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_ADMIN_KEY", "secret")


def spec_of(model, **changes):
    spec = GeneratorSpec("served", model.config, "float32", arithmetic_of(CPU), ENGINE, CompileConfig(), PARAMS)
    return dataclasses.replace(spec, **changes)


@contextlib.contextmanager
def pool_of(model, folder, *urls, spec=None, silence_seconds=10.0):
    pool = GeneratorPool(512, 16384, 20.0, vocab_size=model.config.vocab_size)
    pool.load_weights({"version": 3, "folder": str(folder)})
    with ServerSupervisor(urls, spec or spec_of(model), pool, silence_seconds, retry_seconds=0.1):
        yield pool


@contextlib.contextmanager
def pool_with(url, server, **options):
    """A pool whose only generator is the server, of whatever kind."""
    pool = GeneratorPool(512, 1024, 60.0, vocab_size=512)
    remote = HttpRemote(url, server, pool, **options)
    pool.join(remote)
    try:
        yield pool
    finally:
        pool.leave(url)
        remote.close()


def generate(pool, prompts, params):
    return PoolSampler(pool).generate(prompts, params)


def each(**changes):
    return [dataclasses.replace(PARAMS, seed=seed * 2**58 + 17, **changes) for seed in range(len(PROMPTS))]


@pytest.mark.parametrize(
    "cuts",
    [
        {"temperature": 1.0, "min_p": 0.01},
        *(pytest.param(cuts, marks=pytest.mark.slow) for cuts in ({}, {"top_p": 0.9, "top_k": 50})),
    ],
)
def test_a_server_gives_the_tokens_and_bits_of_a_local_engine(server, model, folder, cuts):
    expected = Engine(model, ENGINE).generate(PROMPTS, each(**cuts))
    with pool_of(model, folder, server.url) as pool:
        found = generate(pool, PROMPTS, each(**cuts))
    assert plain(found) == plain(expected)
    assert {reason for group in plain(expected) for *_, reason in group} == {"stop", "length"}
    assert all(c.versions == [3] * len(c.token_ids) for group in found for c in group)
    assert bool(found[0][0].truncated_logprobs) == bool(cuts)


def test_a_request_made_after_weights_that_are_deleted_is_not_sampled_from_older_ones(server, model, folder):
    loading, may_load = find_server(server.url, spec_of(model)), threading.Event()

    class Slow:
        capacity, exact, loads_between_requests, sample = 4, True, False, loading.sample

        def load(self, client, folder, version):
            may_load.wait()
            loading.load(client, folder, version)

    with pool_with(server.url, Slow(), finish=True) as pool:
        may_load.set()
        pool.load_weights({"version": 3, "folder": str(folder)})
        pool.wait_for_weights()
        may_load.clear()
        pool.load_weights({"version": 4, "folder": str(folder / "deleted")})
        request = pool.begin(PROMPTS[0], dataclasses.replace(PARAMS, seed=17))
        pool.load_weights({"version": 5, "folder": str(folder)})
        may_load.set()
        wait_until(lambda: not request.unfinished)
    assert {version for sample in request.samples for version in sample.versions} == {5}


def test_samples_that_another_has_begun_continue_with_the_same_bits(server, model, folder):
    params = dataclasses.replace(PARAMS, seed=17, top_p=0.9)
    (expected,) = Engine(model, ENGINE).generate(PROMPTS[:1], params)
    begun = [
        Completion(c.token_ids[:known], c.logprobs[:known], "abort", c.truncated_logprobs[:known], [3] * known)
        for c, known in zip(expected, (7, 0, len(expected[2].token_ids)))
    ]
    begun[2].finish_reason = expected[2].finish_reason
    with pool_of(model, folder, server.url, spec=spec_of(model, params=params)) as pool:
        found = completed([pool.begin(PROMPTS[0], params, begun)])
    assert found == plain([expected])


def test_an_aborted_request_frees_the_servers_cache(server, model, folder):
    with pool_of(model, folder, server.url) as pool:
        params = dataclasses.replace(PARAMS, seed=1, max_tokens=500, stop_token_ids=())
        before = server.engine.statistics.tokens_sampled
        request = pool.begin(PROMPTS[0], params)
        wait_until(lambda: any(sample.token_ids for sample in request.samples))
        pool.abort(request.id)
        server.wait_until(server.all_pages_free, seconds=5)
        assert server.engine.statistics.tokens_sampled - before < 500 * params.n
        assert not any(sample.finish_reason for sample in request.samples)


def test_new_weights_come_from_folders_of_which_two_are_kept(server, model, folder, tmp_path):
    trained = load_model(folder)
    with pool_of(model, folder, server.url) as pool:
        folders = WeightFolders(tmp_path / "weights", trained, torch.float32, World(CPU))
        for version in (4, 5, 6):
            with torch.no_grad():
                trained.embed_tokens.weight.mul_(1.01)
            pool.load_weights({"version": version, "folder": str(folders.write(version))})
            pool.wait_for_weights()
            found = generate(pool, PROMPTS[:1], each(max_tokens=8)[:1])
            assert plain(found) == plain(Engine(trained, ENGINE).generate(PROMPTS[:1], each(max_tokens=8)[:1]))
            assert {version} == {v for group in found for c in group for v in c.versions}
        kept = sorted(path.name for path in (tmp_path / "weights").iterdir())
        assert kept == ["version_00000005", "version_00000006"]
        folders.close()
        assert not (tmp_path / "weights").exists()


def test_weights_that_the_server_cannot_read_end_the_run_with_what_to_change(server, model, tmp_path):
    with pool_of(model, tmp_path / "elsewhere", server.url) as pool, pytest.raises(UserError) as error:
        pool.wait_for_weights()
    assert str(error.value).startswith(server.url) and "no such folder" in str(error.value)
    assert "--output that the server can read under the same path" in str(error.value)


def test_weights_of_another_run_are_noticed(server, model, folder, caplog):
    with pool_of(model, folder, server.url) as pool:
        pool.wait_for_weights()
        with server.http() as client:
            body = {"path": str(folder), "version": 99}
            client.post("/admin/weights", json=body, headers={"Authorization": "Bearer secret"})
        # It is lost, joins again, and gets the run's own weights back.
        assert plain(generate(pool, PROMPTS, each())) == plain(Engine(model, ENGINE).generate(PROMPTS, each()))
    assert "weights version 99, which this run has not published" in caplog.text


# Servers that respond as none should, and what is refused at the start.


@contextlib.contextmanager
def listening(handle):
    """The URL of a socket; `handle` is called with each of its connections, in a thread of its own."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection):
        with contextlib.suppress(OSError), connection:
            handle(connection)

    def accept():
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


OK = b"HTTP/1.1 200 OK\r\n\r\n"


def responding(responses):
    """The URL of a server that gives these responses by path, and an empty object to all else."""

    def respond(connection):
        path = connection.recv(65536).split(b" ")[1].decode()
        connection.sendall(next((responses[each] for each in responses if path.startswith(each)), OK + b"{}"))
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass

    return listening(respond)


def stream(*changes):
    """The stream of a request for one sample per change, each of four tokens."""
    whole = dict(
        token_ids=[7] * 4, logprobs={"token_logprobs": [-1.0] * 4}, weights_versions=[1] * 4, finish_reason="length"
    )
    choices = [{"index": index} | whole | change for index, change in enumerate(changes)]
    return OK + b"data: " + json.dumps({"choices": choices}).encode() + b"\n\ndata: [DONE]\n\n"


@contextlib.contextmanager
def requested(url):
    """A pool whose only generator is the server, and a request for two samples of four tokens."""
    with pool_with(url, LockstepServer(4)) as pool:
        pool.load_weights({"version": 1, "folder": "/nowhere"})
        pool.wait_for_weights()
        yield pool, pool.begin([1, 2], SamplingParams(n=2, max_tokens=4, seed=1))


FAILED = OK + b"data: " + json.dumps({"error": {"message": "\x1b[31mred\nline"}}).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("response", "invalid"),
    [
        (stream(dict(logprobs={"token_logprobs": [-1.0]}), {}), "1 log-probabilities for 4 tokens"),
        (stream({}, dict(index=99)), "sample 99 of a request for 2"),
        (stream(dict(token_ids="abcd")), "makes no sense"),
        (OK + b"data: [1]\n\n", "makes no sense"),
        (OK + b"data: " + b"[" * 200_000 + b"\n\n", "makes no sense"),
        *((lost, "") for lost in (FAILED, OK + b"data: {]\n\n", OK, stream(dict(finish_reason="abort")))),
    ],
)
def test_a_server_that_sends_invalid_data_gets_no_more_requests_and_one_whose_stream_fails_may_return(
    caplog, response, invalid
):
    with responding({"/v1/completions": response}) as url, requested(url) as (pool, request):
        wait_until(lambda: not pool.names)
        assert pool.banned == ({url} if invalid else set()) and request.unfinished
        (line,) = [line for line in caplog.messages if line.startswith(url)]
        assert line.isprintable() and invalid in line and ("gets no more requests" in line) == bool(invalid)


def test_a_correct_stream_completes_the_request():
    with responding({"/v1/completions": stream({}, {})}) as url, requested(url) as (pool, request):
        wait_until(lambda: not request.unfinished)
        assert pool.ready == [url] and request.samples[1].token_ids == [7] * 4


def refusal_of(model, folder, url, **changes):
    with pytest.raises(UserError) as error, pool_of(model, folder, url, spec=spec_of(model, **changes)):
        pass
    assert str(error.value).startswith(url) and str(error.value).isprintable()
    return str(error.value)


LOCKSTEP = OK + b'{"data": [{"owned_by": "lockstep"}]}'
VLLM = OK + b'{"data": [{"owned_by": "vllm", "id": "m"}]}'


@pytest.mark.parametrize(
    ("responses", "message"),
    [
        ({"/v1/models": b"SSH-2.0-OpenSSH\r\n\r\n"}, "does not answer"),
        ({"/v1/models": b""}, "does not answer"),
        ({"/v1/models": b"HTTP/1.1 404 no\r\n\r\n\x1b"}, "correct actors.urls"),
        ({"/v1/models": OK + b"<html>"}, "neither `lockstep serve` nor vLLM"),
        ({"/v1/models": OK + b'{"data": [{"owned_by": ["x"]}]}'}, "neither `lockstep serve` nor vLLM"),
        ({"/v1/models": LOCKSTEP, "/admin/model": OK + b'{"shape": 5}'}, "makes no sense"),
        ({"/v1/models": VLLM, "/server_info": OK + b"[]"}, "VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_what_is_no_server_of_a_kind_that_is_known_is_refused(model, folder, responses, message):
    with responding(responses) as url:
        assert message in refusal_of(model, folder, url)


def test_a_url_where_nobody_answers_is_refused(model, folder):
    in_time = pytest.raises(UserError, match="accepts connections, but does not answer in time")
    with listening(lambda connection: threading.Event().wait(1)) as url, in_time:
        owner_of(HttpClient(url, seconds=0.1))
    assert "does not answer" in refusal_of(model, folder, url)


def test_a_server_without_the_runs_keys_is_refused(server, model, folder, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_ADMIN_KEY", "other")
    assert "set LOCKSTEP_ADMIN_KEY to the one that it was started with" in refusal_of(model, folder, server.url)
    with running_server(folder, api_key="key", engine=ENGINE) as other:
        assert "set LOCKSTEP_API_KEY" in refusal_of(model, folder, other.url)
        monkeypatch.setenv("LOCKSTEP_API_KEY", "key")
        assert "start both it and the run with LOCKSTEP_ADMIN_KEY set" in refusal_of(model, folder, other.url)


def test_a_server_of_another_model_or_with_too_little_room_is_refused_by_name(server, model, folder):
    def refusal(**changes):
        return refusal_of(model, folder, server.url, **changes)

    def shape(**changes):
        return dataclasses.replace(model.config, **changes)

    assert "num_layers 4, but the run's has 5" in refusal(shape=shape(num_layers=5))
    assert "eos_token_ids [0], but the run's has [7]" in refusal(shape=shape(eos_token_ids=(7,)))
    assert "--parallel.reduction-chunks 2" in refusal(shape=shape(reduction_chunks=2))
    assert "--dtype bfloat16" in refusal(dtype="bfloat16")
    assert "--arithmetic other" in refusal(arithmetic="other")
    assert "--compile.backend inductor" in refusal(compile=CompileConfig("inductor"))
    assert "a higher --max-n" in refusal(params=dataclasses.replace(PARAMS, n=129))
    with running_server(folder, admin_key="secret", engine=dataclasses.replace(ENGINE, cache_tokens=256)) as small:
        assert "engine.cache_tokens 256" in refusal_of(model, folder, small.url)


# What is lost, and comes back.


class Proxy:
    """Passes bytes on to a server until it is frozen: then connections stay open, and nothing comes through."""

    def __init__(self, url):
        self._target = ("127.0.0.1", int(url.rpartition(":")[2]))
        self.thawed = threading.Event()
        self.thawed.set()

    def handle(self, connection):
        with socket.create_connection(self._target) as there:
            back = threading.Thread(target=self._pump, args=(there, connection), daemon=True)
            back.start()
            self._pump(connection, there)
            back.join()

    def _pump(self, source, sink):
        with contextlib.suppress(OSError):
            while part := source.recv(65536):
                self.thawed.wait()
                sink.sendall(part)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def half_way(pool, count=1):
    """Requests of whose samples some tokens have arrived."""
    requests = [pool.begin(PROMPTS[0], LONG) for _ in range(count)]
    wait_until(lambda: all(len(sample.token_ids) > 3 for request in requests for sample in request.samples))
    return requests


def completed(requests):
    wait_until(lambda: not any(request.unfinished for request in requests))
    return plain([[sample.completion() for sample in request.samples] for request in requests])


LONG = dataclasses.replace(PARAMS, seed=5, max_tokens=150, stop_token_ids=())


def test_a_server_that_hangs_is_lost_in_time_and_joins_again_once_it_answers(server, model, folder, caplog):
    expected = Engine(model, ENGINE).generate(PROMPTS[:1], LONG)
    proxy = Proxy(server.url)
    with listening(proxy.handle) as url, pool_of(model, folder, url, silence_seconds=0.3) as pool:
        pool.wait_for_weights()
        requests = half_way(pool)
        proxy.thawed.clear()
        assert requests[0].unfinished, "it was done before it froze"
        wait_until(lambda: not pool.ready)
        assert "it has not answered for 0.3 s" in caplog.text
        proxy.thawed.set()
        assert completed(requests) == plain(expected)


def test_a_server_that_dies_leaves_its_samples_to_another_and_comes_back(server, model, folder, caplog):
    expected = Engine(model, ENGINE).generate(PROMPTS[:1], LONG)
    with contextlib.ExitStack() as opened:
        dying = opened.enter_context(running_server(folder, admin_key="secret", engine=ENGINE))
        with pool_of(model, folder, dying.url, server.url, silence_seconds=2.0) as pool:
            wait_until(lambda: len(pool.ready) == 2)
            requests = half_way(pool, 2)
            for _ in range(2):  # the second time it aborts what runs
                dying.server._event_loop.call_soon_threadsafe(dying.server.begin_end)
            assert completed(requests) == plain(expected * 2)
            assert re.search(f"{dying.url}: .*; 1 others continue its 3 unfinished samples", caplog.text)
            opened.close()
            wait_until(lambda: pool.ready == [server.url])
            port = int(dying.url.rpartition(":")[2])
            with running_server(folder, admin_key="secret", engine=ENGINE, port=port):
                wait_until(lambda: len(pool.ready) == 2)
                pool.leave(dying.url).close()


def test_requests_wait_while_other_clients_have_taken_all_places(folder, model):
    with (
        running_server(folder, admin_key="secret", engine=ENGINE, max_waiting=0) as busy,
        busy.http() as client,
        pool_of(model, folder, busy.url) as pool,
    ):
        pool.wait_for_weights()
        body = dict(prompt=[1], n=16, max_tokens=450, ignore_eos=True, stream=True)
        with client.stream("POST", "/v1/completions", json=body) as others:
            lines = others.iter_lines()  # without which the stream would be closed
            next(lines)
            request = pool.begin(PROMPTS[0], dataclasses.replace(PARAMS, seed=3))
            busy.wait_until(lambda: 'status="429"' in busy.metrics())
        wait_until(lambda: not request.unfinished)


def test_a_refused_request_and_logits_that_are_not_finite_are_errors_of_the_user(server, model, folder, tmp_path):
    with pool_of(model, folder, server.url) as pool, pytest.raises(UserError, match="maximum context length is 512"):
        generate(pool, PROMPTS[:1], dataclasses.replace(PARAMS, max_tokens=600))
    broken = load_model(folder)
    with torch.no_grad():
        broken.norm.weight.fill_(float("nan"))
    folders = WeightFolders(tmp_path, broken, torch.float32, World(CPU))
    with pool_of(model, folders.write(7), server.url) as pool, pytest.raises(UserError, match="not finite"):
        generate(pool, PROMPTS[:1], dataclasses.replace(PARAMS, seed=1))
