"""The HTTP routes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from lockstep.data.chat import ChatTemplate, ChatTemplateError, readable_values
from lockstep.data.messages import SHOWN_REASONING
from lockstep.errors import UserError, closest
from lockstep.generate.sampling_params import Completion
from lockstep.generate.server.access_log import DISCONNECTED, AccessLog, record_of
from lockstep.generate.server.adapters import load_adapter, unload_adapter
from lockstep.generate.server.answer import LONG_TEXT, answer, check_count, check_text, encode
from lockstep.generate.server.api_error import ApiError, engine_failed, json_response, shutting_down
from lockstep.generate.server.body import LARGE, Body, parse_body, read_body
from lockstep.generate.server.keys import RequireKeys
from lockstep.generate.server.limits import LimitRequests
from lockstep.generate.server.page import page_response
from lockstep.generate.server.protocol import (
    ChatRequest,
    CompletionRequest,
    LoadAdapterRequest,
    UnloadAdapterRequest,
    WeightsRequest,
)
from lockstep.generate.server.service import Service
from lockstep.generate.server.watch import ClientGone, watch
from lockstep.generate.server.weights import describe, update_weights
from lockstep.model import check_token_ids
from lockstep.version import __version__

COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens for completions; that of chats is the rest of the context."""
LONG_CHAT = 64
"""Messages; longer chats are rendered one at a time, even if their text is short."""
MOST_OF_VALUES = 2**16
"""Most characters of a request's template values as JSON: a template may write them in every message."""

routes = APIRouter()


def create_app(service: Service) -> ASGIApp:
    """The application: the routes, wrapped by keys, limits and the access log."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.engine_loop.start()
        yield
        await service.engine_loop.stop()
        service.turns.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(
        title="Lockstep", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.state.service = service
    app.include_router(routes)
    for error in (ApiError, UserError, HTTPException, ClientGone, ClientDisconnect, Exception):
        app.add_exception_handler(error, _error_response)
    config = service.config
    limited = LimitRequests(app, service.limits)
    return AccessLog(RequireKeys(limited, config.api_key, config.admin_key), service.metrics)


def _described(body: type[BaseModel]) -> dict[str, Any]:
    # Bodies are read by `read_body`, with a size limit, so FastAPI does not know their schema.
    schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
    for name, definition in schema.pop("$defs", {}).items():
        schema = _inlined(schema, f"#/components/schemas/{name}", definition)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _inlined(node: Any, reference: str, definition: dict[str, Any]) -> Any:
    if isinstance(node, dict):
        if node.get("$ref") == reference:
            return definition
        return {key: _inlined(value, reference, definition) for key, value in node.items()}
    return [_inlined(item, reference, definition) for item in node] if isinstance(node, list) else node


@routes.post("/v1/completions", openapi_extra=_described(CompletionRequest))
async def completions(request: Request) -> Response:
    """Continues one or more prompts, as text or as tokens."""
    return await _watched(request, _complete)


async def _complete(service: Service, request: Request, data: bytes) -> Response:
    body = await _parsed(service, data, CompletionRequest)
    _check_model(service, body.model)
    body.check_fields()
    prompts = await _prompts(service, body.prompt, body.n or 1)
    max_tokens = body.max_tokens or COMPLETION_TOKENS
    begun = _begun(service, body, len(prompts), max_tokens)
    return await answer(service, request, body, prompts, max_tokens, body.logprobs, chat=False, begun=begun)


@routes.post("/v1/chat/completions", openapi_extra=_described(ChatRequest))
async def chat_completions(request: Request) -> Response:
    """Returns the assistant's next message."""
    return await _watched(request, _chat)


async def _chat(service: Service, request: Request, data: bytes) -> Response:
    body = await _parsed(service, data, ChatRequest)
    _check_model(service, body.model)
    body.check_fields()
    check_count(service, 1, body.n or 1)
    if service.template is None:
        raise ApiError(
            400,
            "this model's folder has no chat template; use /v1/completions, or put a chat_template.jinja next to its "
            "weights",
            code="no_chat_template",
        )
    messages = [message.plain(service.between) for message in body.messages]
    values, of_values = _template_values(service.template, body)
    # Reasoning has two keys, of which a template writes one.
    characters = sum(len(m["content"]) + len(m.get(SHOWN_REASONING[0], "")) for m in messages)
    check_text(service, characters, "messages")
    render = partial(service.template.render, messages, **values)
    try:
        # A template may write the values in every message.
        small = characters + of_values * len(messages) < LONG_TEXT and len(messages) < LONG_CHAT
        text = await (asyncio.to_thread if small else service.in_turn)(render)
    except ChatTemplateError as error:
        raise ApiError(400, str(error), "messages", "chat_template") from error
    (prompt,) = await encode(service, [text], "messages")
    max_tokens = body.max_completion_tokens or body.max_tokens or max(1, service.context - len(prompt))
    top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return await answer(service, request, body, [prompt], max_tokens, top_logprobs, chat=True)


def _template_values(template: ChatTemplate, body: ChatRequest) -> tuple[dict[str, Any], int]:
    """The request's values for its chat template, and their size in characters.

    Raises ApiError for a value that the template does not read, and if they are too large.
    """
    values, field = body.chat_template_kwargs or {}, "chat_template_kwargs"
    readable = readable_values(template)
    for name in values:
        if name not in readable:
            hint = closest(name[:64], readable) or " Remove it"
            raise ApiError(400, f"{field}: the model's chat template takes no {name[:64]!r}.{hint}", field)
    size = len(json.dumps(values, ensure_ascii=False))
    if size > MOST_OF_VALUES:
        raise ApiError(400, f"{field} has {size} characters, more than {MOST_OF_VALUES}", field)
    return values, size


@routes.get("/", include_in_schema=False)
async def page(request: Request) -> Response:
    """A chat page for the browser."""
    return page_response()


@routes.get("/v1/models")
async def models(request: Request) -> Response:
    """The model that is served, and its adapters."""
    service = _service(request)
    data = [_model(service, name) for name in (service.model_name, *service.adapters)]
    return json_response({"object": "list", "data": data})


@routes.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    """The served model, or an adapter of it, under its name."""
    service = _service(request)
    _check_model(service, name)
    return json_response(_model(service, name))


@routes.get("/health")  # separately for the schema, in which a route of two methods would be duplicated
@routes.api_route("/health", methods=["GET", "HEAD"], include_in_schema=False)
async def health(request: Request) -> Response:
    """200 while requests are accepted."""
    service = _service(request)
    if service.engine_loop.failure is not None:
        raise engine_failed()
    if service.limits.draining:
        raise shutting_down()
    return json_response({"status": "ok", "weights_version": service.engine.weights_version})


@routes.get("/metrics")
async def metrics(request: Request) -> Response:
    """Metrics for Prometheus."""
    return Response(_service(request).metrics.text(), media_type=CONTENT_TYPE_LATEST)


@routes.post("/admin/weights", openapi_extra=_described(WeightsRequest))
async def weights(request: Request) -> Response:
    """Loads other weights while requests are running."""
    service = _service(request)
    return json_response(await update_weights(service, parse_body(await _read(service, request), WeightsRequest)))


@routes.post("/v1/load_lora_adapter", openapi_extra=_described(LoadAdapterRequest))
async def load_lora_adapter(request: Request) -> Response:
    """Loads an adapter while requests are running."""
    service = _service(request)
    body = parse_body(await _read(service, request), LoadAdapterRequest)
    return PlainTextResponse(await load_adapter(service, body))


@routes.post("/v1/unload_lora_adapter", openapi_extra=_described(UnloadAdapterRequest))
async def unload_lora_adapter(request: Request) -> Response:
    """Unloads an adapter; running requests finish with it."""
    service = _service(request)
    body = parse_body(await _read(service, request), UnloadAdapterRequest)
    return PlainTextResponse(await unload_adapter(service, body))


@routes.get("/admin/model")
async def description(request: Request) -> Response:
    """What determines the bits of a response, and the server's limits: for a training run that samples here."""
    return json_response(describe(_service(request)))


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _model(service: Service, name: str) -> dict[str, Any]:
    adapter = service.adapters.get(name)
    return {
        "id": name,
        "object": "model",
        "created": adapter.created if adapter else service.started,
        "owned_by": "lockstep",
        "root": adapter.path if adapter else service.config.model,
        "parent": service.model_name if adapter else None,
        "max_model_len": service.context,
    }


def _check_model(service: Service, name: str | None) -> None:
    if name is not None and name != service.model_name and name not in service.adapters:
        there = ", ".join(map(repr, (service.model_name, *service.adapters)))
        message = f"the model {name[:200]!r} does not exist; this server has {there}"
        raise ApiError(404, message, "model", "model_not_found")


async def _watched(
    request: Request, work: Callable[[Service, Request, bytes], Coroutine[Any, Any, Response]]
) -> Response:
    """Runs `work` on the body; cancels it if the client disconnects or the request takes too long."""
    service = _service(request)
    data = await _read(service, request)
    return await watch(request, work(service, request, data), service.limits)


async def _read(service: Service, request: Request) -> bytes:
    body = read_body(request, service.config.max_body_bytes)
    return await watch(request, body, service.limits, reads_body=True)


async def _parsed(service: Service, data: bytes, kind: type[Body]) -> Body:
    return parse_body(data, kind) if len(data) < LARGE else await service.in_turn(partial(parse_body, data, kind))


async def _prompts(service: Service, prompt: str | list[str] | list[int] | list[list[int]], n: int) -> list[list[int]]:
    """The prompts' tokens."""
    single = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
    each: list[Any] = [prompt] if single else list(prompt)
    check_count(service, len(each), n)
    if not all(each) or not each:
        raise ApiError(400, "a prompt is empty; give at least one token", "prompt")
    if isinstance(each[0], str):
        return await encode(service, each, "prompt")
    for number, tokens in enumerate(each):
        _check_tokens(service, tokens, "prompt", "" if single else f" {number}")
    return each


def _check_tokens(service: Service, tokens: list[int], field: str, number: str = "") -> None:
    try:
        check_token_ids(tokens, service.engine.model.config.vocab_size, field + number)
    except UserError as error:
        raise ApiError(400, str(error), field) from error


def _begun(service: Service, body: CompletionRequest, prompts: int, max_tokens: int) -> list[Completion]:
    """The samples to continue; their log-probabilities are not needed, since the client has them."""
    if body.begun is None:
        return []
    if prompts > 1:
        raise ApiError(400, f"begun needs exactly one prompt, not {prompts}", "begun")
    for tokens in body.begun:
        if len(tokens) > max_tokens:
            message = f"begun has {len(tokens)} tokens of a sample, but max_tokens, including them, is {max_tokens}"
            raise ApiError(400, message, "begun")
        if tokens:
            _check_tokens(service, tokens, "begun")
    return [Completion(tokens, [0.0] * len(tokens), "abort") for tokens in body.begun]


async def _error_response(request: Request, error: Exception) -> Response:
    match error:
        case ApiError():
            return error.response()
        case UserError():
            return ApiError(400, str(error)).response()
        case HTTPException():
            message = f"{request.method} {request.scope['path'][:200]}: {error.detail}"
            code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
            return ApiError(error.status_code, message, code=code, headers=error.headers).response()
        case ClientGone() | ClientDisconnect():
            record_of(request).aborted = "disconnected"
            return Response(status_code=DISCONNECTED)  # only for the log
    return ApiError(500, "internal error; see the server's log").response()
