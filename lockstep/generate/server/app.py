"""The HTTP routes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from lockstep.errors import UserError
from lockstep.generate.server.access_log import DISCONNECTED, AccessLog, record_of
from lockstep.generate.server.adapters import load_adapter, unload_adapter
from lockstep.generate.server.anthropic_bodies import CountTokensRequest, MessagesRequest
from lockstep.generate.server.anthropic_messages import count_tokens, create_message
from lockstep.generate.server.api_error import ApiError, engine_failed, json_response, shutting_down
from lockstep.generate.server.body import LARGE, Body, parse_body, read_body
from lockstep.generate.server.chats import chat
from lockstep.generate.server.completions import complete
from lockstep.generate.server.error_shape import error_response
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
from lockstep.generate.server.responses_api import delete, respond, retrieve
from lockstep.generate.server.responses_body import ResponsesRequest
from lockstep.generate.server.service import Service
from lockstep.generate.server.tokenize import (
    Detokenize,
    HasMessages,
    TokenizeChat,
    TokenizePrompt,
    detokenize,
    tokenize,
    tokenize_chat,
)
from lockstep.generate.server.watch import ClientGone, watch
from lockstep.generate.server.weights import describe, update_weights
from lockstep.version import __version__

Asked = TypeVar("Asked", bound=BaseModel)
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
    return await _watched(request, CompletionRequest, complete)


@routes.post("/v1/chat/completions", openapi_extra=_described(ChatRequest))
async def chat_completions(request: Request) -> Response:
    """Returns the assistant's next message."""
    return await _watched(request, ChatRequest, chat)


@routes.post("/v1/responses", openapi_extra=_described(ResponsesRequest))
async def responses(request: Request) -> Response:
    """Returns the assistant's next items, in a conversation that may continue a stored one."""
    return await _watched(request, ResponsesRequest, respond)


@routes.get("/v1/responses/{response_id}")
async def stored_response(request: Request, response_id: str) -> Response:
    """A stored response."""
    return retrieve(_service(request), request, response_id)


@routes.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> Response:
    """Deletes a stored response."""
    return delete(_service(request), response_id)


@routes.post("/v1/messages", openapi_extra=_described(MessagesRequest))
async def messages(request: Request) -> Response:
    """Returns the assistant's next message, in Anthropic's format."""
    return await _watched(request, MessagesRequest, create_message)


@routes.post("/v1/messages/count_tokens", openapi_extra=_described(CountTokensRequest))
async def message_tokens(request: Request) -> Response:
    """The number of tokens of a prompt for `/v1/messages`."""
    return await _watched(request, CountTokensRequest, count_tokens)


@routes.post("/tokenize", openapi_extra=_described(TokenizePrompt))
async def tokens_of(request: Request) -> Response:
    """The tokens of a text, or of a chat: then the body is that of a chat completion."""
    service, data = _service(request), await _read(request)
    return await watch(request, _tokenize(service, data), service.limits)


async def _tokenize(service: Service, data: bytes) -> Response:
    if (await _parsed(service, data, HasMessages)).messages is None:
        return await tokenize(service, await _parsed(service, data, TokenizePrompt))
    return await tokenize_chat(service, await _parsed(service, data, TokenizeChat))


@routes.post("/detokenize", openapi_extra=_described(Detokenize))
async def text_of(request: Request) -> Response:
    """The text of tokens, special ones included."""

    async def work(service: Service, request: Request, body: Detokenize) -> Response:
        return json_response(await detokenize(service, body.tokens))

    return await _watched(request, Detokenize, work)


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
    return json_response(await update_weights(service, parse_body(await _read(request), WeightsRequest)))


@routes.post("/v1/load_lora_adapter", openapi_extra=_described(LoadAdapterRequest))
async def load_lora_adapter(request: Request) -> Response:
    """Loads an adapter while requests are running."""
    service = _service(request)
    body = parse_body(await _read(request), LoadAdapterRequest)
    return PlainTextResponse(await load_adapter(service, body))


@routes.post("/v1/unload_lora_adapter", openapi_extra=_described(UnloadAdapterRequest))
async def unload_lora_adapter(request: Request) -> Response:
    """Unloads an adapter; running requests finish with it."""
    service = _service(request)
    body = parse_body(await _read(request), UnloadAdapterRequest)
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
        "sampling_defaults": service.sampling_defaults,
    }


def _check_model(service: Service, name: str | None) -> None:
    if name is not None and name != service.model_name and name not in service.adapters:
        there = ", ".join(map(repr, (service.model_name, *service.adapters)))
        message = f"the model {name[:200]!r} does not exist; this server has {there}"
        raise ApiError(404, message, "model", "model_not_found")


async def _watched(
    request: Request, kind: type[Asked], work: Callable[[Service, Request, Asked], Coroutine[Any, Any, Response]]
) -> Response:
    """Runs `work` on the body; cancels it if the client disconnects or the request takes too long."""
    service, data = _service(request), await _read(request)

    async def parse_and_work() -> Response:
        return await work(service, request, await _parsed(service, data, kind))

    return await watch(request, parse_and_work(), service.limits)


async def _read(request: Request) -> bytes:
    service = _service(request)
    body = read_body(request, service.config.max_body_bytes)
    return await watch(request, body, service.limits, reads_body=True)


async def _parsed(service: Service, data: bytes, kind: type[Body]) -> Body:
    """The body, whose model is served here if it names one."""
    large = len(data) >= LARGE
    body = await service.in_turn(partial(parse_body, data, kind)) if large else parse_body(data, kind)
    _check_model(service, getattr(body, "model", None))
    return body


async def _error_response(request: Request, error: Exception) -> Response:
    match error:
        case ApiError():
            problem = error
        case UserError():
            problem = ApiError(400, str(error))
        case HTTPException():
            message = f"{request.method} {request.scope['path'][:200]}: {error.detail}"
            code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
            problem = ApiError(error.status_code, message, code=code, headers=error.headers)
        case ClientGone() | ClientDisconnect():
            record_of(request).aborted = "disconnected"
            return Response(status_code=DISCONNECTED)  # only for the log
        case _:
            problem = ApiError(500, "internal error; see the server's log")
    return error_response(problem, request.scope)
