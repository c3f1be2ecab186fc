"""Servers that sample for a run: `lockstep serve`, whose log-probabilities match the trainer's, and vLLM."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lockstep import ops
from lockstep.errors import UserError, one_line
from lockstep.generate import SamplingParams
from lockstep.model.config import ModelConfig
from lockstep.rl.generators.http_client import HttpClient, HttpError, Unreachable
from lockstep.rl.generators.remote import RemoteSample, Request
from lockstep.rl.generators.response_checks import sample_of
from lockstep.rl.rollouts.plain import plain_shape

SEED_STEP = 0x9E3779B97F4A7C15
CHECK_SECONDS = 10.0
LOAD_SECONDS = 600.0
Part = tuple[int, RemoteSample]
"""The index of a sample, and its new tokens."""


@dataclass(frozen=True)
class ServerRequirements:
    """What a run requires of a server that samples for it."""

    shape: ModelConfig
    dtype: str
    arithmetic: str
    compile: str
    context: int
    """Most tokens of prompt and completion that the run may request."""
    params: SamplingParams
    """How the run samples: samples per prompt, temperature, and truncation."""


class Server(Protocol):
    """What differs between kinds of servers, for `HttpRemote`."""

    exact: bool
    """Whether its log-probabilities match the trainer's bit for bit."""
    loads_between_requests: bool
    """Whether requests must end before it loads new weights."""
    capacity: int
    """Samples that it decodes at a time."""

    def sample(self, client: HttpClient, request: Request, version: int) -> AsyncGenerator[Part, None]:
        """Starts or continues the unfinished samples of a request. version: of its current weights."""

    async def load(self, client: HttpClient, folder: Path, version: int) -> None:
        """Returns once it samples with the weights in `folder`. Raises HttpError if it refuses them."""


async def find_server(client: HttpClient, requirements: ServerRequirements) -> Server:
    """The server that answers. Raises UserError, with what to change, if it cannot sample for the run."""
    owner, model = await owner_of(client)
    try:
        return await (
            _lockstep_server(client, requirements) if owner == "lockstep" else _vllm_server(client, requirements, model)
        )
    except UserError:
        raise
    except Exception as error:  # the response may be anything
        problem = f"its response makes no sense ({one_line(repr(error))}); restart the server, or correct actors.urls"
        raise UserError(f"{client.url}: {problem}") from error


async def owner_of(client: HttpClient) -> tuple[str, dict[str, Any]]:
    """`lockstep` or `vllm`, and its description of the model. Raises UserError if neither answers."""
    models = await _get(client, "/v1/models", "requires an API key; set LOCKSTEP_API_KEY to it")
    try:
        model = models["data"][0]
        owner = model["owned_by"]
    except (TypeError, LookupError):
        owner = model = None
    if owner not in ("lockstep", "vllm"):
        raise UserError(f"{client.url}: this server is neither `lockstep serve` nor vLLM; correct actors.urls")
    return owner, model


async def _get(client: HttpClient, path: str, without_key: str) -> Any:
    try:
        return await client.call("GET", path, seconds=CHECK_SECONDS)
    except HttpError as error:
        if error.status == 401:
            raise UserError(f"{client.url} {without_key}") from error
        raise UserError(f"{client.url}: {path} returns {error}; correct actors.urls") from error
    except Unreachable as error:
        raise UserError(f"{client.url} does not answer: {error}; start the server, or correct actors.urls") from error
    except TimeoutError as error:
        raise UserError(
            f"{client.url} accepts connections, but has not answered for {CHECK_SECONDS:g} s; restart the server, or "
            "correct actors.urls"
        ) from error


def _refuse(client: HttpClient, problem: str, change: str) -> None:
    raise UserError(f"{client.url}: {one_line(problem, 500)}; {change}")


class LockstepServer:
    """`lockstep serve`."""

    exact = True
    loads_between_requests = False

    def __init__(self, capacity: int):
        self.capacity = capacity

    async def sample(self, client: HttpClient, request: Request, version: int) -> AsyncGenerator[Part, None]:
        params = request.params
        body = {
            "prompt": request.prompt,
            "n": params.n,
            "seed": params.seed,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "stop": list(params.stop) or None,
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": params.ignore_eos,
            "logprobs": 0,
            "return_token_ids": True,
            "return_routes": params.routes or None,
            "stream": True,
        }
        if any(sample.token_ids for sample in request.samples):
            body["begun"] = [sample.token_ids for sample in request.samples]
        async with aclosing(client.events("/v1/completions", body)) as events:
            async for event in events:
                for choice in event["choices"]:
                    yield (
                        choice["index"],
                        _sample(
                            choice["token_ids"],
                            choice["logprobs"]["token_logprobs"],
                            choice.get("truncated_logprobs", []),
                            choice["weights_versions"],
                            choice.get("routes", []),
                            choice["finish_reason"],
                        ),
                    )

    async def load(self, client: HttpClient, folder: Path, version: int) -> None:
        body = {"path": str(folder), "version": version}
        await client.call("POST", "/admin/weights", body, LOAD_SECONDS)


def _sample(
    tokens: Any, logprobs: Any, truncated_logprobs: Any, versions: Any, routes: Any, reason: Any
) -> RemoteSample:
    if reason == "abort":  # the server shuts down
        raise Unreachable("it ended a request with 'abort'")
    return sample_of(
        {
            "token_ids": tokens,
            "logprobs": logprobs,
            "truncated_logprobs": truncated_logprobs,
            "versions": versions,
            "routes": routes,
            "finish_reason": reason,
        }
    )


async def _lockstep_server(client: HttpClient, requirements: ServerRequirements) -> LockstepServer:
    try:
        info = await _get(
            client, "/admin/model", "has another admin key; set LOCKSTEP_ADMIN_KEY to the one that it was started with"
        )
    except UserError as error:
        if isinstance(error.__cause__, HttpError) and error.__cause__.status == 404:
            raise UserError(
                f"{client.url} has no admin key, so it accepts no weights; start both it and the run with "
                "LOCKSTEP_ADMIN_KEY set"
            ) from error
        raise
    shape = plain_shape(requirements.shape)
    if (chunks := info["shape"].pop("reduction_chunks")) != (wanted := shape.pop("reduction_chunks")):
        change = f"start it with --parallel.reduction-chunks {wanted}"
        _refuse(client, f"it sums with reduction_chunks {chunks}, but the run with {wanted}", change)
    for name, value in shape.items():
        if info["shape"][name] != value:
            problem = f"its model has {name} {info['shape'][name]}, but the run's has {value}"
            _refuse(client, problem, "serve the model that the run starts from")
    for name in ("dtype", "arithmetic", "compile"):
        if info[name] != (wanted := getattr(requirements, name)):
            if name == "arithmetic" and requirements.dtype == "float32" and {info[name], wanted} <= {*ops.ARITHMETICS}:
                continue  # a CPU's arithmetics differ only in bfloat16
            option = "compile.backend" if name == "compile" else name
            _refuse(
                client,
                f"it computes with {option} {info[name]}, but the run with {wanted}",
                f"give --{option} {wanted}",
            )
    _refuse_short(client, info["context"], requirements, "--engine.cache-tokens")
    limit = info["max_prompt_tokens"]
    if limit and limit < requirements.context - 1:
        _refuse(client, f"it only accepts prompts of up to {limit} tokens", "start it without --max-prompt-tokens")
    places, n = info["max_sequences"] + info["max_waiting"], requirements.params.n
    if n > info["max_n"] or n > places:
        option, most = ("--max-n", info["max_n"]) if n > info["max_n"] else ("--max-waiting", places)
        _refuse(
            client, f"it allows {most} samples per prompt, but the run requests {n}", f"start it with a higher {option}"
        )
    # A remote is sent twice its capacity.
    return LockstepServer(max(1, min(info["max_sequences"], places // 2, info["max_requests"] // 2)))


class VllmServer:
    """vLLM's OpenAI server in its development mode, which has the routes for new weights."""

    exact = False
    loads_between_requests = True

    def __init__(self, model: str, capacity: int, dummy_weights: bool):
        """dummy_weights: it was started with `--load-format dummy`."""
        self.model, self.capacity, self.dummy_weights = model, capacity, dummy_weights

    async def sample(self, client: HttpClient, request: Request, version: int) -> AsyncGenerator[Part, None]:
        begun = any(sample.token_ids for sample in request.samples)
        if not begun:
            async for part in self._stream(client, request, request.prompt, request.params.n, 0, 0, version):
                yield part
            return
        # vLLM's random generator cannot start in the middle of a sample: the rest is a new draw.
        for index, sample in enumerate(request.samples):
            if sample.finish_reason is None:
                prompt, known = request.prompt + sample.token_ids, len(sample.token_ids)
                async for part in self._stream(client, request, prompt, 1, index, known, version):
                    yield part

    async def _stream(
        self, client: HttpClient, request: Request, prompt: list[int], n: int, first: int, known: int, version: int
    ) -> AsyncGenerator[Part, None]:
        """`n` samples with indices from `first`; the last `known` tokens of the prompt count as sampled."""
        params = request.params
        assert params.seed is not None
        body = {
            "model": self.model,
            "prompt": prompt,
            "n": n,
            "seed": (params.seed + known + first * SEED_STEP) % 2**62,
            "max_tokens": params.max_tokens - known,
            "temperature": params.temperature,
            # Otherwise the defaults of generation_config.json apply.
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop": list(params.stop) or None,
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": params.ignore_eos,
            "logprobs": 0,
            "return_token_ids": True,
            "stream": True,
        }
        async with aclosing(client.events("/v1/completions", body)) as events:
            async for event in events:
                for choice in event["choices"]:
                    tokens = choice["token_ids"] or []
                    reason = choice["finish_reason"]
                    scores = choice["logprobs"]["token_logprobs"] if tokens else []
                    yield first + choice["index"], _sample(tokens, scores, [], [version] * len(tokens), [], reason)

    async def load(self, client: HttpClient, folder: Path, version: int) -> None:
        if self.dummy_weights:
            settings = {"load_config": {"load_format": "auto"}}
            await client.call("POST", "/collective_rpc", {"method": "update_config", "args": [settings]}, LOAD_SECONDS)
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await client.call("POST", "/collective_rpc", body, LOAD_SECONDS)
        # Its cache has keys computed with the old weights.
        response = await client.call("POST", "/reset_prefix_cache", None, LOAD_SECONDS)
        if isinstance(response, dict) and not response.get("success", True):
            raise HttpError(0, "its prefix cache is in use by others, so new weights would read keys of old ones")


async def _vllm_server(client: HttpClient, requirements: ServerRequirements, model: dict[str, Any]) -> VllmServer:
    try:
        info = await client.call("GET", "/server_info?config_format=json", seconds=CHECK_SECONDS)
        config = info["vllm_config"]
        model_config, capacity = config["model_config"], int(config["scheduler_config"]["max_num_seqs"])
        mode, overrides = model_config["logprobs_mode"], model_config.get("hf_overrides") or {}
        device, load_format = config["device_config"]["device"], config["load_config"]["load_format"]
    except (HttpError, TypeError, KeyError, ValueError) as error:
        raise UserError(
            f"{client.url}: this vLLM has no routes for new weights; start it with VLLM_SERVER_DEV_MODE=1"
        ) from error
    params = requirements.params
    if params.truncates:
        problem = "vLLM does not report a token's log-probability both before and after a cut"
        _refuse(client, problem, "remove top_k, top_p and min_p, or sample with `lockstep serve`")
    if params.routes == "whole":
        problem = "rl.router_replay has no routes to replay: vLLM does not stream them"
        _refuse(client, problem, "remove it, or sample with `lockstep serve`")
    if mode != "processed_logprobs" and (mode != "raw_logprobs" or params.temperature != 1):
        problem = f"its log-probabilities are {mode}, not those at temperature {params.temperature}"
        _refuse(client, problem, "start it with --logprobs-mode processed_logprobs")
    if device == "cpu" and requirements.shape.tie_embeddings and overrides.get("tie_word_embeddings", True):
        # Its head is packed once, from the weights it started with; only an untied head is packed again.
        _refuse(
            client,
            "on a CPU vLLM (0.32) keeps the old output head of a model with tied embeddings",
            """start it with --hf-overrides '{"tie_word_embeddings": false}' --load-format dummy""",
        )
    _refuse_short(client, model.get("max_model_len") or requirements.context, requirements, "--max-model-len")
    return VllmServer(model["id"], capacity, load_format == "dummy")


def _refuse_short(client: HttpClient, context: int, requirements: ServerRequirements, option: str) -> None:
    if context < requirements.context:
        change = f"start it with a higher {option}, or the run with engine.cache_tokens {context}"
        limit = f"but the run's own limit is {requirements.context}"
        problem = f"it has room for {context} tokens of prompt and completion, {limit}"
        _refuse(client, problem, change)
