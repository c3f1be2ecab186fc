"""Generators behind HTTP, over real servers: the tokens of an engine here, what is refused, and what gets lost."""

import asyncio
import contextlib
import dataclasses
import re
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

import lockstep.rl.generators.http_supervisor as http_supervisor
from lockstep.config import EngineConfig
from lockstep.errors import UserError
from lockstep.generate import Engine, SamplingParams
from lockstep.model import build_model, load_model, preset, save_model
from lockstep.model.arithmetic import arithmetic_of
from lockstep.parallel import World
from lockstep.rl.generators.http_remote import HttpRemote
from lockstep.rl.generators.http_servers import ServerRequirements, find_server
from lockstep.rl.generators.http_supervisor import ServerSupervisor, client_of
from lockstep.rl.generators.pool import GeneratorPool
from lockstep.rl.generators.remote import RemoteSample, Request
from lockstep.rl.weights.folders import WeightFolders
from tests.rl.generators.test_pool import wait_until
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


def _wanted(model, **changes):
    wanted = ServerRequirements(model.config, "float32", arithmetic_of(CPU), "none", 512, PARAMS)
    return dataclasses.replace(wanted, **changes)


@contextlib.contextmanager
def _pool(model, folder, *urls, wanted=None, silence_seconds=10.0):
    pool = GeneratorPool(512, 16384, 20.0)
    pool.load_weights({"version": 3, "folder": str(folder)})
    with ServerSupervisor(urls, wanted or _wanted(model), pool, silence_seconds, retry_seconds=0.1) as generators:
        yield pool, generators


def _each(**changes):
    return [dataclasses.replace(PARAMS, seed=seed * 2**58 + 17, **changes) for seed in range(len(PROMPTS))]


def _plain(groups):
    return [[(c.token_ids, c.logprobs, c.truncated_logprobs, c.finish_reason) for c in group] for group in groups]


@pytest.mark.parametrize("cuts", [{}, {"top_p": 0.9, "top_k": 50}, {"temperature": 1.0, "min_p": 0.01}])
def test_a_server_gives_the_tokens_and_bits_of_an_engine_here(server, model, folder, cuts):
    expected = Engine(model, ENGINE).generate(PROMPTS, _each(**cuts))
    with _pool(model, folder, server.url) as (pool, _):
        found = pool.generate(PROMPTS, _each(**cuts))
    assert _plain(found) == _plain(expected)
    assert {reason for group in _plain(expected) for *_, reason in group} == {"stop", "length"}
    assert all(c.versions == [3] * len(c.token_ids) for group in found for c in group)
    assert bool(found[0][0].truncated_logprobs) == bool(cuts)


class Recorder:
    """Reports of one remote about one request."""

    def __init__(self, samples):
        self.samples, self.changed = samples, threading.Event()

    def sampled(self, remote, parts):
        for _, index, new in parts:
            sample = self.samples[index]
            for name in ("token_ids", "logprobs", "truncated_logprobs", "versions"):
                getattr(sample, name).extend(getattr(new, name))
            sample.finish_reason = new.finish_reason
        if all(sample.finish_reason for sample in self.samples):
            self.changed.set()

    def has_weights(self, remote, version):
        self.changed.set()

    def lost(self, remote, why, invalid=False):
        raise AssertionError(why)

    def wait(self):
        assert self.changed.wait(20)
        self.changed.clear()


def finished(url, wanted, folder, prompt, samples):
    """What a remote makes of samples that were begun."""
    client, reports = client_of(url), Recorder(samples)
    remote = HttpRemote(client, asyncio.run(find_server(client, wanted)), reports)
    try:
        remote.load_weights({"version": 3, "folder": str(folder)})
        reports.wait()
        remote.submit(Request(0, prompt, wanted.params, samples))
        reports.wait()
    finally:
        remote.close()
    return samples


def test_what_is_asked_after_weights_that_are_gone_by_now_is_not_sampled_from_older_ones(server, model, folder):
    params = dataclasses.replace(PARAMS, seed=17)
    samples = [RemoteSample() for _ in range(params.n)]
    client, reports = client_of(server.url), Recorder(samples)
    remote = HttpRemote(client, asyncio.run(find_server(client, _wanted(model))), reports, finish=True)
    try:
        remote.load_weights({"version": 3, "folder": str(folder)})
        reports.wait()
        all_there = threading.Event()
        remote._post(all_there.wait)  # its thread begins with the first when the last is there too
        remote.load_weights({"version": 4, "folder": str(folder / "deleted")})
        remote.submit(Request(0, PROMPTS[0], params, samples))
        remote.load_weights({"version": 5, "folder": str(folder)})
        all_there.set()
        while not all(sample.finish_reason for sample in samples):
            reports.wait()
    finally:
        remote.close()
    assert {version for sample in samples for version in sample.versions} == {5}


def test_samples_that_another_has_begun_go_on_as_they_would_have(server, model, folder):
    params = dataclasses.replace(PARAMS, seed=17, top_p=0.9)
    (expected,) = Engine(model, ENGINE).generate(PROMPTS[:1], params)
    samples = [
        RemoteSample(whole.token_ids[:known], whole.logprobs[:known], whole.truncated_logprobs[:known], [3] * known)
        for whole, known in zip(expected, (7, 0, len(expected[2].token_ids)))
    ]
    samples[2].finish_reason = expected[2].finish_reason
    found = finished(server.url, _wanted(model, params=params), folder, PROMPTS[0], samples)
    assert _plain([[sample.completion() for sample in found]]) == _plain([expected])


def test_what_is_given_up_frees_the_servers_cache(server, model, folder):
    with _pool(model, folder, server.url) as (pool, _):
        pool.wait_for_weights()
        request_id = pool.add(PROMPTS[0], dataclasses.replace(PARAMS, seed=1, max_tokens=500, stop_token_ids=()))
        samples = pool.samples(request_id)
        while not any(sample.token_ids for sample in samples):
            pool.step()
        pool.abort(request_id)
        server.wait_until(server.all_pages_free, seconds=5)
        assert not any(sample.finish_reason for sample in samples)


def test_new_weights_come_from_folders_of_which_two_are_kept(server, model, folder, tmp_path):
    trained = load_model(folder)
    with _pool(model, folder, server.url) as (pool, _):
        folders = WeightFolders(tmp_path / "weights", trained, torch.float32, World(CPU))
        for version in (4, 5, 6):
            with torch.no_grad():
                trained.embed_tokens.weight.mul_(1.01)
            pool.load_weights({"version": version, "folder": str(folders.write(version))})
            pool.wait_for_weights()
            found = pool.generate(PROMPTS, _each())
            assert _plain(found) == _plain(Engine(trained, ENGINE).generate(PROMPTS, _each()))
            assert {version} == {v for group in found for c in group for v in c.versions}
        kept = sorted(path.name for path in (tmp_path / "weights").iterdir())
        assert kept == ["version_00000005", "version_00000006"]
        folders.close()
        assert not (tmp_path / "weights").exists()


def test_weights_that_the_server_cannot_read_end_the_run_with_what_to_change(server, model, tmp_path):
    with _pool(model, tmp_path / "elsewhere", server.url) as (pool, _), pytest.raises(UserError) as error:
        pool.wait_for_weights()
    assert str(error.value).startswith(server.url) and "no such folder" in str(error.value)
    assert "--output that the server can read under the same path" in str(error.value)


def test_weights_of_another_run_are_noticed(server, model, folder, caplog):
    with _pool(model, folder, server.url) as (pool, _):
        pool.wait_for_weights()
        with server.http() as client:
            body = {"path": str(folder), "version": 99}
            client.post("/admin/weights", json=body, headers={"Authorization": "Bearer secret"})
        # It is lost, joins again, and gets the run's own weights back.
        assert _plain(pool.generate(PROMPTS, _each())) == _plain(Engine(model, ENGINE).generate(PROMPTS, _each()))
    assert "weights version 99, which this run has not published" in caplog.text


# What is refused at the start.


@contextlib.contextmanager
def _listening(handle):
    """The URL of a socket each of whose connections `handle` gets."""
    listener = socket.create_server(("127.0.0.1", 0))
    kept = []

    def accept():
        with contextlib.suppress(OSError):
            while True:
                kept.append(listener.accept()[0])
                handle(kept[-1])

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
        for connection in kept:
            connection.close()


def _refusal(model, folder, url, **changes):
    with pytest.raises(UserError) as error, _pool(model, folder, url, wanted=_wanted(model, **changes)):
        pass
    assert str(error.value).startswith(url)
    return str(error.value)


def test_a_url_where_nobody_answers_is_refused(model, folder):
    with _listening(lambda connection: None) as url:
        pass
    assert "does not answer" in _refusal(model, folder, url)


def test_a_url_that_is_silent_is_refused(model, folder, monkeypatch):
    monkeypatch.setattr("lockstep.rl.generators.http_servers.CHECK_SECONDS", 0.2)
    with _listening(lambda connection: None) as url:
        assert "has not answered for 0.2 s" in _refusal(model, folder, url)


@pytest.mark.parametrize(
    "said",
    [b"SSH-2.0-OpenSSH\r\n\r\n", b"", b"HTTP/1.1 200 OK\r\ncontent-length: zz\r\n\r\n", b"HTTP/1.1 \xff\r\n\r\n"],
)
def test_what_does_not_speak_http_is_refused(model, folder, said):
    def answer(connection):
        connection.recv(10)
        connection.sendall(said)
        connection.shutdown(socket.SHUT_RDWR)

    with _listening(answer) as url:
        assert "does not answer" in _refusal(model, folder, url)


def test_another_http_server_is_refused(model, folder):
    class Other(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{other.server_port}"
        status = 200
        assert "neither `lockstep serve` nor vLLM" in _refusal(model, folder, url)
        status = 404
        assert "correct actors.urls" in _refusal(model, folder, url)
        other.shutdown()


def test_a_server_without_the_runs_keys_is_refused(server, model, folder, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_ADMIN_KEY", "other")
    assert "set LOCKSTEP_ADMIN_KEY to the one that it was started with" in _refusal(model, folder, server.url)
    with running_server(folder, api_key="key", engine=ENGINE) as other:
        assert "set LOCKSTEP_API_KEY" in _refusal(model, folder, other.url)
        monkeypatch.setenv("LOCKSTEP_API_KEY", "key")
        assert "start both it and the run with LOCKSTEP_ADMIN_KEY set" in _refusal(model, folder, other.url)


def test_a_server_of_another_model_or_with_too_little_room_is_refused_by_name(server, model, folder):
    def refusal(**changes):
        return _refusal(model, folder, server.url, **changes)

    def shape(**changes):
        return dataclasses.replace(model.config, **changes)

    assert "num_layers 4, but the run's has 5" in refusal(shape=shape(num_layers=5))
    assert "eos_token_ids [0], but the run's has [7]" in refusal(shape=shape(eos_token_ids=(7,)))
    assert "--parallel.reduction-chunks 2" in refusal(shape=shape(reduction_chunks=2))
    assert "--dtype bfloat16" in refusal(dtype="bfloat16")
    assert "--arithmetic other" in refusal(arithmetic="other")
    assert "--compile.backend inductor" in refusal(compile="inductor")
    assert "engine.cache_tokens 512" in refusal(context=513)
    assert "a higher --max-n" in refusal(params=dataclasses.replace(PARAMS, n=129))


# What gets lost, and comes back.


class Proxy:
    """Passes bytes on to a server until it is frozen: then connections stay open, and nothing comes through."""

    def __init__(self, url):
        self._target = ("127.0.0.1", int(url.rpartition(":")[2]))
        self.thawed = threading.Event()
        self.thawed.set()

    def handle(self, connection):
        there = socket.create_connection(self._target)
        for source, sink in ((connection, there), (there, connection)):
            threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source, sink):
        with contextlib.suppress(OSError):
            while part := source.recv(65536):
                self.thawed.wait()
                sink.sendall(part)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _half_way(pool, requests):
    samples = [sample for request in requests for sample in pool.samples(request)]
    while not all(len(sample.token_ids) > 3 for sample in samples):
        pool.step()
    return samples


LONG = dataclasses.replace(PARAMS, seed=5, max_tokens=150, stop_token_ids=())


def test_a_server_that_hangs_is_lost_in_time_and_joins_again_once_it_answers(server, model, folder, caplog):
    (expected,) = Engine(model, ENGINE).generate(PROMPTS[:1], LONG)
    proxy = Proxy(server.url)
    with _listening(proxy.handle) as url, _pool(model, folder, url, silence_seconds=0.5) as (pool, _):
        pool.wait_for_weights()
        samples = _half_way(pool, [pool.add(PROMPTS[0], LONG)])
        proxy.thawed.clear()
        known = [len(sample.token_ids) for sample in samples]
        assert max(known) < 150, "it was done before it froze"
        while pool.ready:
            pool.step()
        assert "it has not answered for 0.5 s" in caplog.text
        proxy.thawed.set()
        while any(sample.finish_reason is None for sample in samples):
            pool.step()
    assert _plain([[sample.completion() for sample in samples]]) == _plain([expected])


def test_a_server_that_dies_leaves_its_samples_to_another_and_comes_back(server, model, folder, caplog):
    (expected,) = Engine(model, ENGINE).generate(PROMPTS[:1], LONG)
    with contextlib.ExitStack() as opened:
        dying = opened.enter_context(running_server(folder, admin_key="secret", engine=ENGINE))
        with _pool(model, folder, dying.url, server.url, silence_seconds=2.0) as (pool, _):
            while len(pool.ready) < 2:
                pool.step()
            samples = _half_way(pool, [pool.add(PROMPTS[0], LONG) for _ in range(2)])
            for _ in range(2):  # the second time it aborts what runs
                dying.server._event_loop.call_soon_threadsafe(dying.server.begin_end)
            while any(sample.finish_reason is None for sample in samples):
                pool.step()
            groups = [samples[:3], samples[3:]]
            assert _plain([[s.completion() for s in group] for group in groups]) == _plain([expected] * 2)
            assert pool.ready == [server.url]
            assert re.search(f"{dying.url}: .*; 1 others continue its 3 unfinished samples", caplog.text)
            opened.close()
            port = int(dying.url.rpartition(":")[2])
            with running_server(folder, admin_key="secret", engine=ENGINE, port=port):
                until = time.monotonic() + 20
                while len(pool.ready) < 2:
                    assert time.monotonic() < until
                    pool.step()
                pool.leave(dying.url).close()


@pytest.fixture
def busy(folder):
    with running_server(folder, admin_key="secret", engine=ENGINE, max_waiting=0) as running:
        yield running


def test_requests_wait_where_other_clients_have_taken_all_places(folder, model, busy):
    with busy.http() as client, _pool(model, folder, busy.url) as (pool, _):
        pool.wait_for_weights()
        body = dict(prompt=[1], n=16, max_tokens=450, ignore_eos=True, stream=True)
        with client.stream("POST", "/v1/completions", json=body) as others:
            lines = others.iter_lines()  # without which the stream would be closed
            next(lines)
            request = pool.add(PROMPTS[0], dataclasses.replace(PARAMS, seed=3))
            (first, *_) = pool.samples(request)
            busy.wait_until(lambda: 'status="429"' in busy.metrics())
        while first.finish_reason is None:
            pool.step()


def test_a_request_that_the_server_refuses_is_an_error_of_the_user(server, model, folder):
    with _pool(model, folder, server.url) as (pool, _), pytest.raises(UserError, match="exceed the context of 512"):
        pool.generate(PROMPTS[:1], dataclasses.replace(PARAMS, max_tokens=600))


def test_logits_that_are_not_finite_end_a_request_as_an_engine_here_does(server, model, folder, tmp_path):
    broken = load_model(folder)
    with torch.no_grad():
        broken.norm.weight.fill_(float("nan"))
    folders = WeightFolders(tmp_path, broken, torch.float32, World(CPU))
    with _pool(model, folders.write(7), server.url) as (pool, _), pytest.raises(UserError, match="not finite"):
        pool.generate(PROMPTS[:1], dataclasses.replace(PARAMS, seed=1))


def test_a_server_that_answers_nonsense_as_it_comes_back_is_asked_again(server, model, folder, monkeypatch, caplog):
    with _pool(model, folder, server.url) as (pool, _):
        pool.wait_for_weights()
        find, asked = http_supervisor.find_server, []

        async def find_once_it_is_up(*arguments):
            asked.append(arguments)
            if len(asked) < 3:
                raise KeyError("shape")
            return await find(*arguments)

        monkeypatch.setattr(http_supervisor, "find_server", find_once_it_is_up)
        pool.leave(server.url).close()
        wait_until(lambda: pool.ready)
    assert len(asked) == 3
    assert caplog.text.count("is not back: its response makes no sense (KeyError('shape'))") == 1
