"""The HTTP routes of the training API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from fastapi import APIRouter, FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from lockstep.errors import UserError
from lockstep.generate.server.access_log import DISCONNECTED, AccessLog, record_of
from lockstep.generate.server.api_error import ApiError, engine_failed, json_response, shutting_down
from lockstep.generate.server.body import parse_body, read_body
from lockstep.generate.server.keys import RequireKeys
from lockstep.generate.server.watch import ClientGone, watch
from lockstep.train_server import protocol, requests, rest
from lockstep.train_server.compressed import CAN_DECOMPRESS, read_protobuf
from lockstep.train_server.promises import Promise, Result
from lockstep.train_server.service import Service
from lockstep.version import __version__

Body = TypeVar("Body", bound=BaseModel)
Found = TypeVar("Found")
API = "/api/v1"
HOLD_SECONDS = 25.0
"""How long a request for a result that is not there yet is held open: the client gives up after 45."""
CANCEL_AT_ONCE = 64
routes = APIRouter(prefix=API)


def create_app(service: Service) -> ASGIApp:
    """The application: the routes, wrapped by the key and the access log."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.engine_loop.start()
        looks_after = asyncio.ensure_future(service.look_after())
        yield
        looks_after.cancel()
        with suppress(asyncio.CancelledError):
            await looks_after
        await service.engine_loop.stop()

    app = FastAPI(title="Lockstep", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.include_router(routes)
    app.include_router(rest.routes, prefix=API)
    app.add_api_route("/files/{run}/{kind}/{name}/{file}", rest.exported_file)
    app.add_api_route("/health", health)
    app.add_api_route("/metrics", metrics)
    for error in (ApiError, UserError, HTTPException, ClientGone, ClientDisconnect, Exception):
        app.add_exception_handler(error, _error_response)
    return AccessLog(RequireKeys(app, service.config.api_key, ""), service.metrics)


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def read(request: Request, kind: type[Body]) -> Body:
    """The request's JSON body."""
    return parse_body(await _read(request), kind)


async def _read(request: Request) -> bytes:
    service = service_of(request)
    if service.limits.draining:
        raise shutting_down()
    return await watch(request, read_body(request, service.config.max_body_bytes), service.limits, reads_body=True)


async def of_model(request: Request, kind: type[Body], work: Callable[[Service, Body], Promise]) -> Response:
    """Answers a numbered request of a model by its promise: one that fails, if the body is wrong, since later requests
    wait for its number."""
    service, data = service_of(request), await _read(request)
    try:
        body = parse_body(data, kind)
    except ApiError as error:
        try:
            numbered = parse_body(data, protocol.Numbered)
        except ApiError:
            raise error from None
        return promised(requests.refused(service, numbered, error.message))
    return promised(work(service, body))


def promised(promise: Promise, **more: object) -> Response:
    return json_response({"request_id": promise.request_id, **more})


async def health(request: Request) -> Response:
    """200 while requests are accepted."""
    service = service_of(request)
    if service.engine_loop.failure is not None:
        raise engine_failed()
    if service.limits.draining:
        raise shutting_down()
    return json_response({"status": "ok"})


async def metrics(request: Request) -> Response:
    """Metrics for Prometheus."""
    return Response(service_of(request).metrics.text(), media_type=CONTENT_TYPE_LATEST)


@routes.get("/healthz")
async def healthz(request: Request) -> Response:
    return await health(request)


@routes.get("/get_server_capabilities")
async def capabilities(request: Request) -> Response:
    service = service_of(request)
    model = {
        "model_name": service.model_name,
        "max_context_length": service.engine.max_positions,
        "trainable": True,
        "sampleable": True,
    }
    return json_response({"supported_models": [model]})


@routes.post("/client/config")
async def client_config(request: Request) -> Response:
    """How the client is to behave: what it has off by default is on."""
    return json_response(
        {
            "pjwt_auth_enabled": False,
            "parallel_fwdbwd_chunks": True,
            "proto_compress_fwdbwd": CAN_DECOMPRESS,
            "sample_use_retrieve_futures": True,
            "custom_loss_server_side": True,
            "sample_join_sampling_session": True,
        }
    )


@routes.post("/client/dynamic_config")
async def client_dynamic_config(request: Request) -> Response:
    return json_response(
        {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": CANCEL_AT_ONCE}
    )


@routes.post("/telemetry")
async def telemetry(request: Request) -> Response:
    """Accepted, and thrown away."""
    service = service_of(request)
    await watch(request, read_body(request, service.config.max_body_bytes), service.limits, reads_body=True)
    return json_response({"status": "accepted"})


@routes.post("/create_session")
async def create_session(request: Request) -> Response:
    body = await read(request, protocol.CreateSession)
    session = service_of(request).open_session(body.user_metadata, body.display_name)
    return json_response({"type": "create_session", "session_id": session.session_id})


@routes.post("/session_heartbeat")
async def session_heartbeat(request: Request) -> Response:
    body = await read(request, protocol.OfSession)
    service_of(request).session(body.session_id)
    return json_response({"type": "session_heartbeat"})


@routes.post("/sessions/{session_id}/finish")
async def finish_session(request: Request, session_id: str) -> Response:
    await read(request, protocol.Finish)
    await service_of(request).end_session(session_id)
    return json_response({})


@routes.post("/create_model")
async def create_model(request: Request) -> Response:
    body = await read(request, protocol.CreateModel)
    promise = requests.create_model(service_of(request), body)
    return promised(promise, model_id=f"{body.session_id}:train:{body.model_seq_id}")


@routes.post("/get_info")
async def get_info(request: Request) -> Response:
    body = await read(request, protocol.OfModel)
    service = service_of(request)
    model = service.model(body.model_id)
    data = {
        "arch": service.base.config.family,
        "model_name": service.model_name,
        "tokenizer_id": service.model_name,
    }
    return json_response(
        {
            "type": "get_info",
            "model_data": data,
            "model_id": model.model_id,
            "is_lora": True,
            "lora_rank": model.lora.rank,
            "model_name": service.model_name,
        }
    )


@routes.post("/unload_model")
async def unload_model(request: Request) -> Response:
    body = await read(request, protocol.OfModel)
    return promised(requests.unload_model(service_of(request), body))


@routes.post("/forward_backward")
async def forward_backward(request: Request) -> Response:
    service = service_of(request)
    if service.limits.draining:
        raise shutting_down()
    body = read_protobuf(request, service.config.max_body_bytes)
    data = await watch(request, body, service.limits, reads_body=True)
    return promised(await requests.forward_backward(service, data))


@routes.post("/optim_step")
async def optim_step(request: Request) -> Response:
    return await of_model(request, protocol.OptimStep, requests.optim_step)


@routes.post("/save_weights")
async def save_weights(request: Request) -> Response:
    return await of_model(request, protocol.SaveWeights, requests.save_weights)


@routes.post("/save_weights_for_sampler")
async def save_weights_for_sampler(request: Request) -> Response:
    return await of_model(request, protocol.SaveForSampler, requests.save_for_sampler)


@routes.post("/save_weights_external")
async def save_weights_external(request: Request) -> Response:
    return await of_model(request, protocol.SaveExternal, requests.save_external)


@routes.post("/load_weights")
async def load_weights(request: Request) -> Response:
    return await of_model(request, protocol.LoadWeights, requests.load_weights)


@routes.post("/copy_weights")
async def copy_weights(request: Request) -> Response:
    body = await read(request, protocol.CopyWeights)
    return json_response({"tinker_path": await requests.copy_weights(service_of(request), body)})


@routes.post("/create_custom_loss")
async def create_custom_loss(request: Request) -> Response:
    body = await read(request, protocol.CreateLoss)
    return promised(requests.create_custom_loss(service_of(request), body))


@routes.post("/create_sampling_session")
async def create_sampling_session(request: Request) -> Response:
    body = await read(request, protocol.CreateSampler)
    sampler = await requests.create_sampler(service_of(request), body)
    return json_response({"type": "create_sampling_session", "sampling_session_id": sampler.sampler_id})


@routes.post("/join_sampling_session")
async def join_sampling_session(request: Request) -> Response:
    body = await read(request, protocol.OfSampler)
    sampler = service_of(request).sampler(body.sampling_session_id)
    sampler.clones += 1
    return json_response({"type": "join_sampling_session", "client_counter": sampler.clones})


@routes.get("/samplers/{sampler_id}")
async def sampler_info(request: Request, sampler_id: str) -> Response:
    service = service_of(request)
    sampler = service.sampler(sampler_id)
    return json_response(
        {"sampler_id": sampler.sampler_id, "base_model": service.model_name, "model_path": sampler.path}
    )


@routes.post("/asample")
async def asample(request: Request) -> Response:
    body = await read(request, protocol.Sample)
    promise = await requests.sample_later(service_of(request), body)
    names = [f"{promise.request_id}:{number}" for number in range(body.num_samples)]
    return promised(promise, sample_sequence_ids=names)


@routes.post("/cancel_future")
async def cancel_future(request: Request) -> Response:
    body = await read(request, protocol.Cancel)
    service_of(request).promises.cancel(body.request_id)
    return json_response({})


@routes.post("/retrieve_future")
async def retrieve_future(request: Request) -> Response:
    """The result of a request; 408 if it is not there within `HOLD_SECONDS`, upon which the client asks again."""
    body = await read(request, protocol.Retrieve)
    service = service_of(request)
    promise = service.promises.named(body.request_id)
    await _held(request, promise.done.wait(), HOLD_SECONDS)
    if promise.result is None:
        again = {"type": "try_again", "request_id": promise.request_id, "queue_state": "active"}
        return json_response(again, 408, {"x-should-retry": "false"})
    service.promises.retrieved(promise)
    return _answer(promise.result)


@routes.post("/retrieve_futures")
async def retrieve_futures(request: Request) -> Response:
    """Which samples of a sampling session have ended since the last call."""
    body = await read(request, protocol.RetrieveMany)
    service = service_of(request)
    service.sampler(body.target.sampling_session_id)
    for request_id in body.retrieved_request_ids:
        if (promise := service.promises.find(request_id)) is not None:
            service.promises.retrieved(promise)
    completions = service.promises.completions((body.target.sampling_session_id, body.target.cloned_sampler_id))
    seconds = HOLD_SECONDS if body.timeout is None else min(max(body.timeout, 0.0), HOLD_SECONDS)
    held = await _held(request, completions.after(body.prev_cursor, seconds), HOLD_SECONDS + 1)
    found, cursor = held or ([], body.prev_cursor)
    return json_response({"completions": found, "cursor": cursor})


def _answer(result: Result) -> Response:
    return Response(result.body, media_type=result.content_type)


async def _held(request: Request, work: Awaitable[Found], seconds: float) -> Found | None:
    """What `work` returns, or None after so many seconds; ends at once if the client is gone."""

    async def wait() -> Found | None:
        with suppress(TimeoutError):
            return await asyncio.wait_for(work, seconds)
        return None

    return await watch(request, wait(), service_of(request).limits)


async def _error_response(request: Request, error: Exception) -> Response:
    match error:
        case ApiError():
            problem = error
        case UserError():
            problem = ApiError(422, str(error))
        case HTTPException():
            problem = ApiError(error.status_code, f"{request.method} {request.scope['path'][:200]}: {error.detail}")
        case ClientGone() | ClientDisconnect():
            record_of(request).aborted = "disconnected"
            return Response(status_code=DISCONNECTED)  # only for the log
        case _:
            problem = ApiError(500, "internal error; see the server's log", headers={"x-should-retry": "false"})
    return json_response({"detail": problem.message}, problem.status, problem.headers)
