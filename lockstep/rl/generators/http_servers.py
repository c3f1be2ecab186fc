"""Generators behind HTTP (`actors.urls`): `lockstep serve`, whose log-probabilities match the trainer's, and vLLM."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from lockstep import ops
from lockstep.config import ActorsConfig
from lockstep.errors import UserError, one_line
from lockstep.rl.generators.remote import RemoteSample, Request
from lockstep.rl.generators.spec import GeneratorSpec
from lockstep.rl.rollouts.plain import plain_shape

CONNECT_SECONDS = 5.0
CHECK_SECONDS = 10.0
LOAD_SECONDS = 600.0
RESPONSE_BYTES = 2**24
"""Most bytes read of a response that is not a stream."""
SEED_STEP = 0x9E3779B97F4A7C15
Part = tuple[int, RemoteSample]
"""The index of a sample, and its new tokens."""


class HttpError(Exception):
    """The server returned an error. message: the server's; code: OpenAI's name for the error, if it sent one."""

    def __init__(self, status: int, content: Any):
        """content: of the response: JSON, or text."""
        error = content.get("error", content) if isinstance(content, dict) else content
        fields = error if isinstance(error, dict) else {"message": str(error) or "no reason given"}
        self.status, self.code = status, str(fields.get("code") or "")
        self.message = one_line(fields.get("message") or fields.get("detail") or json.dumps(fields), 1000)
        super().__init__(f"{self.message} (status {status})")


class Unreachable(Exception):
    """The server does not answer, or not in valid HTTP, or the connection broke."""


class HttpClient:
    """Calls to the server at `url`, one at a time, each on its own connection.

    Keys are LOCKSTEP_API_KEY and, for its admin routes, LOCKSTEP_ADMIN_KEY from the environment.
    """

    def __init__(self, url: str, seconds: float = CHECK_SECONDS):
        """seconds: timeout of calls that give none."""
        self.url, self._seconds = url.rstrip("/"), seconds
        self.closed = threading.Event()
        self._socket: socket.socket | None = None

    def close(self) -> None:
        """Ends the current call, whose request the server then aborts, and all later ones: they raise Unreachable."""
        self.closed.set()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def call(self, method: str, path: str, body: Any = None, seconds: float | None = None) -> Any:
        """The response's JSON; None if it is not JSON. Raises HttpError, Unreachable, and TimeoutError if nothing
        arrives for `seconds`."""
        with self._response(method, path, body, seconds or self._seconds) as response:
            return _json(response.read(RESPONSE_BYTES))

    def events(self, path: str, body: Any) -> Iterator[Any]:
        """The server-sent events of a response, each JSON, up to `[DONE]`. Raises HttpError and Unreachable."""
        with self._response("POST", path, body, None) as response:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                event = _json(data)
                if event is None:
                    raise Unreachable(f"an event of its stream is not JSON: {data[:80]!r}")
                if isinstance(event, dict) and event.get("error"):
                    raise HttpError(0, event)
                yield event
        raise Unreachable("its stream ended before it was done")

    @contextlib.contextmanager
    def _response(self, method: str, path: str, body: Any, seconds: float | None) -> Iterator[http.client.HTTPResponse]:
        connection = self._connect()
        key = os.environ.get("LOCKSTEP_ADMIN_KEY" if path.startswith("/admin/") else "LOCKSTEP_API_KEY")
        headers = {"Connection": "close", "Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        try:
            self._socket = connection.sock
            self._socket.settimeout(seconds)
            if self.closed.is_set():  # `close` may have come before there was a socket
                raise Unreachable("the connection was closed on this side")
            connection.request(method, path, "" if body is None else json.dumps(body), headers)
            with connection.getresponse() as response:
                if response.status != 200:
                    content = response.read(RESPONSE_BYTES)
                    raise HttpError(response.status, _json(content) or content[:200].decode(errors="replace"))
                yield response
        except TimeoutError:
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unreachable(one_line(error) or type(error).__name__) from error
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        host = parts.hostname or ""
        if parts.scheme == "https":
            tls = ssl.create_default_context()
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, parts.port, timeout=CONNECT_SECONDS, context=tls
            )
        else:
            connection = http.client.HTTPConnection(host, parts.port, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
        except OSError as error:
            raise Unreachable(str(error)) from error
        return connection


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None


Server: TypeAlias = "LockstepServer | VllmServer"


def find_server(url: str, spec: GeneratorSpec) -> Server:
    """The server that answers. Raises UserError, with what to change, if it cannot sample for the run."""
    client = HttpClient(url)
    try:
        owner, model = owner_of(client)
        return _lockstep_server(client, spec) if owner == "lockstep" else _vllm_server(client, spec, model)
    except UserError:
        raise
    except Exception as error:  # the response may be anything
        problem = f"its response makes no sense ({one_line(repr(error))}); restart the server, or correct actors.urls"
        raise UserError(f"{url}: {problem}") from error


def owner_of(client: HttpClient) -> tuple[str, dict[str, Any]]:
    """`lockstep` or `vllm`, and its description of the model. Raises UserError if neither answers."""
    models = _get(client, "/v1/models", {401: "requires an API key; set LOCKSTEP_API_KEY to it"})
    try:
        model = models["data"][0]
        owner = model["owned_by"]
    except (TypeError, LookupError):
        owner = model = None
    if owner not in ("lockstep", "vllm"):
        raise UserError(f"{client.url}: this server is neither `lockstep serve` nor vLLM; correct actors.urls")
    return owner, model


def servers_are_exact(actors: ActorsConfig) -> bool:
    """Whether the log-probabilities of the servers at `actors.urls` match the trainer's bit for bit.

    Raises UserError if one does not answer, or the run's generators are of both kinds.
    """
    owners = {url: owner_of(HttpClient(url))[0] for url in actors.urls}
    if len({*owners.values()}) > 1:
        listed = ", ".join(f"{url} ({owner})" for url, owner in owners.items())
        raise UserError(f"actors.urls: the log-probabilities of {listed} differ; give servers of one kind")
    exact = "lockstep" in owners.values()
    if actors.processes and not exact:
        raise UserError(
            "actors.urls has vLLM servers, whose log-probabilities differ from those of other generators; use one kind"
        )
    return exact


def _get(client: HttpClient, path: str, hints: Mapping[int, str]) -> Any:
    """hints: what an error status means here, and what to do. Raises UserError."""
    try:
        return client.call("GET", path)
    except HttpError as error:
        hint = hints.get(error.status, f"returns {error} for {path}; correct actors.urls")
        raise UserError(f"{client.url} {hint}") from error
    except Unreachable as error:
        raise UserError(f"{client.url} does not answer: {error}; start the server, or correct actors.urls") from error
    except TimeoutError as error:
        raise UserError(
            f"{client.url} accepts connections, but does not answer in time; restart the server, or correct actors.urls"
        ) from error


def _refuse(client: HttpClient, problem: str, change: str) -> None:
    raise UserError(f"{client.url}: {one_line(problem, 500)}; {change}")


def _body(request: Request, prompt: list[int], **more: Any) -> dict[str, Any]:
    """Of a request for completions. It gives all parameters, as a server has defaults of its own."""
    params = request.params
    return {
        "prompt": prompt,
        "n": params.n,
        "seed": params.seed,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
        "repetition_penalty": params.repetition_penalty,
        "stop": list(params.stop) or None,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "logprobs": 0,
        "return_token_ids": True,
        "stream": True,
        **more,
    }


class LockstepServer:
    """`lockstep serve`."""

    exact = True
    """Whether its log-probabilities match the trainer's bit for bit."""
    loads_between_requests = False
    """Whether requests must end before it loads new weights."""

    def __init__(self, capacity: int):
        """capacity: samples that it decodes at a time."""
        self.capacity = capacity

    def sample(self, client: HttpClient, request: Request, version: int) -> Iterator[Part]:
        """Starts or continues the unfinished samples of a request. version: of its current weights."""
        body = _body(request, request.prompt, return_routes=request.params.routes or None)
        if any(sample.token_ids for sample in request.samples):
            body["begun"] = [sample.token_ids for sample in request.samples]
        for event in client.events("/v1/completions", body):
            for choice in event["choices"]:
                yield (
                    choice["index"],
                    RemoteSample(
                        choice["token_ids"],
                        choice["logprobs"]["token_logprobs"],
                        choice.get("truncated_logprobs", []),
                        choice["weights_versions"],
                        choice["finish_reason"],
                        choice.get("routes", []),
                    ),
                )

    def load(self, client: HttpClient, folder: Path, version: int) -> None:
        """Returns once it samples with the weights in `folder`. Raises HttpError if it refuses them."""
        body = {"path": str(folder), "version": version}
        client.call("POST", "/admin/weights", body, LOAD_SECONDS)


def _lockstep_server(client: HttpClient, spec: GeneratorSpec) -> LockstepServer:
    hints = {
        401: "has another admin key; set LOCKSTEP_ADMIN_KEY to the one that it was started with",
        404: "has no admin key, so it accepts no weights; start both it and the run with LOCKSTEP_ADMIN_KEY set",
    }
    info = _get(client, "/admin/model", hints)
    shape = plain_shape(spec.shape)
    if (chunks := info["shape"].pop("reduction_chunks")) != (wanted := shape.pop("reduction_chunks")):
        change = f"start it with --parallel.reduction-chunks {wanted}"
        _refuse(client, f"it sums with reduction_chunks {chunks}, but the run with {wanted}", change)
    for name, value in shape.items():
        if info["shape"][name] != value:
            problem = f"its model has {name} {info['shape'][name]}, but the run's has {value}"
            _refuse(client, problem, "serve the model that the run starts from")
    settings = {"dtype": spec.dtype, "arithmetic": spec.arithmetic, "compile": spec.compile.backend}
    for name, wanted in settings.items():
        if info[name] != wanted:
            if name == "arithmetic" and spec.dtype == "float32" and {info[name], wanted} <= {*ops.ARITHMETICS}:
                continue  # a CPU's arithmetics differ only in bfloat16
            option = "compile.backend" if name == "compile" else name
            _refuse(
                client,
                f"it computes with {option} {info[name]}, but the run with {wanted}",
                f"give --{option} {wanted}",
            )
    _refuse_short(client, info["context"], spec, "--engine.cache-tokens")
    limit = info["max_prompt_tokens"]
    if limit and limit < spec.context - 1:
        _refuse(client, f"it only accepts prompts of up to {limit} tokens", "start it without --max-prompt-tokens")
    places, n = info["max_sequences"] + info["max_waiting"], spec.params.n
    if n > info["max_n"] or n > places:
        option, most = ("--max-n", info["max_n"]) if n > info["max_n"] else ("--max-waiting", places)
        _refuse(
            client, f"it allows {most} samples per prompt, but the run requests {n}", f"start it with a higher {option}"
        )
    # A remote is sent twice its capacity.
    return LockstepServer(max(1, min(info["max_sequences"], places // 2, info["max_requests"] // 2)))


class VllmServer:
    """vLLM's OpenAI server in its development mode, which has the routes for new weights. As `LockstepServer`."""

    exact = False
    loads_between_requests = True

    def __init__(self, model: str, capacity: int, dummy_weights: bool):
        """dummy_weights: it was started with `--load-format dummy`."""
        self.model, self.capacity, self.dummy_weights = model, capacity, dummy_weights

    def sample(self, client: HttpClient, request: Request, version: int) -> Iterator[Part]:
        if not any(sample.token_ids for sample in request.samples):
            yield from self._stream(client, 0, _body(request, request.prompt), version)
            return
        params = request.params
        assert params.seed is not None
        # vLLM's random generator cannot start in the middle of a sample: the rest is a new draw.
        for index, sample in enumerate(request.samples):
            if sample.finish_reason is None:
                known = sample.sampled
                seed = (params.seed + known + index * SEED_STEP) % 2**62
                more = {"n": 1, "seed": seed, "max_tokens": params.max_tokens - known}
                yield from self._stream(
                    client, index, _body(request, request.prompt + sample.token_ids, **more), version
                )

    def _stream(self, client: HttpClient, first: int, body: dict[str, Any], version: int) -> Iterator[Part]:
        """The samples of a call, with indices from `first`."""
        for event in client.events("/v1/completions", body | {"model": self.model}):
            for choice in event["choices"]:
                tokens = choice["token_ids"] or []
                logprobs = choice["logprobs"]["token_logprobs"] if tokens else []
                sample = RemoteSample(tokens, logprobs, [], [version] * len(tokens), choice["finish_reason"])
                yield first + choice["index"], sample

    def load(self, client: HttpClient, folder: Path, version: int) -> None:
        if self.dummy_weights:
            settings = {"load_config": {"load_format": "auto"}}
            client.call("POST", "/collective_rpc", {"method": "update_config", "args": [settings]}, LOAD_SECONDS)
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        client.call("POST", "/collective_rpc", body, LOAD_SECONDS)
        # Its cache has keys computed with the old weights.
        response = client.call("POST", "/reset_prefix_cache", None, LOAD_SECONDS)
        if isinstance(response, dict) and not response.get("success", True):
            raise HttpError(0, "its prefix cache is in use by others, so new weights would read keys of old ones")


def _vllm_server(client: HttpClient, spec: GeneratorSpec, model: dict[str, Any]) -> VllmServer:
    try:
        info = client.call("GET", "/server_info?config_format=json")
        config = info["vllm_config"]
        model_config, capacity = config["model_config"], int(config["scheduler_config"]["max_num_seqs"])
        mode, overrides = model_config["logprobs_mode"], model_config.get("hf_overrides") or {}
        device, load_format = config["device_config"]["device"], config["load_config"]["load_format"]
    except (HttpError, TypeError, KeyError, ValueError) as error:
        raise UserError(
            f"{client.url}: this vLLM has no routes for new weights; start it with VLLM_SERVER_DEV_MODE=1"
        ) from error
    params = spec.params
    if params.truncates:
        problem = "vLLM does not report a token's log-probability both before and after a cut"
        _refuse(client, problem, "remove top_k, top_p and min_p, or sample with `lockstep serve`")
    if params.routes == "whole":
        problem = "rl.router_replay has no routes to replay: vLLM does not stream them"
        _refuse(client, problem, "remove it, or sample with `lockstep serve`")
    if mode != "processed_logprobs" and (mode != "raw_logprobs" or params.temperature != 1):
        problem = f"its log-probabilities are {mode}, not those at temperature {params.temperature}"
        _refuse(client, problem, "start it with --logprobs-mode processed_logprobs")
    if device == "cpu" and spec.shape.tie_embeddings and overrides.get("tie_word_embeddings", True):
        # Its head is packed once, from the weights it started with; only an untied head is packed again.
        _refuse(
            client,
            "on a CPU vLLM (0.32) keeps the old output head of a model with tied embeddings",
            """start it with --hf-overrides '{"tie_word_embeddings": false}' --load-format dummy""",
        )
    _refuse_short(client, model.get("max_model_len") or spec.context, spec, "--max-model-len")
    return VllmServer(model["id"], capacity, load_format == "dummy")


def _refuse_short(client: HttpClient, context: int, spec: GeneratorSpec, option: str) -> None:
    if context < spec.context:
        change = f"start it with a higher {option}, or the run with engine.cache_tokens {context}"
        limit = f"but the run's own limit is {spec.context}"
        problem = f"it has room for {context} tokens of prompt and completion, {limit}"
        _refuse(client, problem, change)
