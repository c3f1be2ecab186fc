"""Routes that list and manage runs and saved states: what the client's RestClient and its command line call."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from lockstep.errors import UserError
from lockstep.generate.server.api_error import ApiError, json_response
from lockstep.generate.server.body import parse_body, read_body
from lockstep.train_server.protocol import Life, OfPath
from lockstep.train_server.service import Service
from lockstep.train_server.states import SCHEME, SavedState, as_checkpoint, timestamp

routes = APIRouter()
URL_SECONDS = 3600
"""How long the address of an exported file can be used."""
_SECRET = secrets.token_bytes(16)


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _page(request: Request, items: list[Any], most: int = 1000) -> tuple[list[Any], dict[str, int]]:
    """The part of a list that the query's `limit` and `offset` ask for."""
    numbers = []
    for name, default in (("limit", 20), ("offset", 0)):
        text = request.query_params.get(name, str(default))
        if not text.isdecimal() or len(text) > 9:
            raise UserError(f"{name} is {text[:20]!r}; it must be a whole number")
        numbers.append(int(text))
    limit, offset = min(numbers[0], most), numbers[1]
    return items[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(items)}


def _runs(service: Service) -> list[str]:
    """The runs that are here or have saved states, newest first."""
    saved = [state.run for state in reversed(service.states.all())]
    return list(dict.fromkeys([*(m for s in reversed(service.sessions.values()) for m in s.models), *saved]))


def _run(service: Service, run: str) -> dict[str, Any]:
    states = service.states.of_run(run)
    model = next((s.models[run] for s in service.sessions.values() if run in s.models), None)
    if model is None and not states:
        raise ApiError(404, f"there is no training run {run[:80]!r}")
    newest = {kind: [state for state in states if state.kind == kind] for kind in ("weights", "sampler_weights")}
    last = model.last_request if model else states[-1].created
    return {
        "training_run_id": run,
        "base_model": service.model_name,
        "model_owner": "local",
        "is_lora": True,
        "corrupted": False,
        "lora_rank": model.lora.rank if model else states[-1].rank,
        "last_request_time": timestamp(last),
        "last_checkpoint": as_checkpoint(newest["weights"][-1]) if newest["weights"] else None,
        "last_sampler_checkpoint": as_checkpoint(newest["sampler_weights"][-1]) if newest["sampler_weights"] else None,
        "user_metadata": model.user_metadata if model else None,
    }


@routes.get("/training_runs")
async def training_runs(request: Request) -> Response:
    service = _service(request)
    runs, cursor = _page(request, _runs(service))
    return json_response({"training_runs": [_run(service, run) for run in runs], "cursor": cursor})


@routes.get("/training_runs/{run}")
async def training_run(request: Request, run: str) -> Response:
    return json_response(_run(_service(request), run))


@routes.get("/training_runs/{run}/checkpoints")
async def checkpoints_of_run(request: Request, run: str) -> Response:
    states = _service(request).states.of_run(run)
    return json_response({"checkpoints": [as_checkpoint(state) for state in reversed(states)]})


@routes.get("/checkpoints")
async def checkpoints(request: Request) -> Response:
    states = list(reversed(_service(request).states.all()))
    found, cursor = _page(request, states)
    return json_response({"checkpoints": [as_checkpoint(state) for state in found], "cursor": cursor})


def _state(service: Service, run: str, checkpoint: str) -> tuple[SavedState, Path]:
    return service.states.find(f"{SCHEME}{run}/{checkpoint}")


@routes.delete("/training_runs/{run}/checkpoints/{kind}/{name}")
async def delete_checkpoint(request: Request, run: str, kind: str, name: str) -> Response:
    service = _service(request)
    state, _ = _state(service, run, f"{kind}/{name}")
    await asyncio.to_thread(service.states.delete, state)
    return json_response({})


@routes.put("/training_runs/{run}/checkpoints/{kind}/{name}/ttl")
async def set_life(request: Request, run: str, kind: str, name: str) -> Response:
    service = _service(request)
    body = parse_body(await read_body(request, service.config.max_body_bytes), Life)
    expires = None if body.ttl_seconds is None else time.time() + body.ttl_seconds
    await asyncio.to_thread(service.states.set_life, f"{SCHEME}{run}/{kind}/{name}", expires)
    return json_response({})


@routes.api_route("/training_runs/{run}/checkpoints/{kind}/{name}/publish", methods=["POST", "DELETE"])
async def publish(request: Request, run: str, kind: str, name: str) -> Response:
    raise UserError("this server has no public states; copy the folder instead")


@routes.get("/training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls")
async def external_weights_urls(request: Request, run: str, kind: str, name: str) -> Response:
    """An address for each file of an exported adapter, which needs no key for an hour."""
    service = _service(request)
    _, folder = _state(service, run, f"{kind}/{name}")
    expires = int(time.time()) + URL_SECONDS
    files = [f"adapter_{part}" for part in ("config.json", "model.safetensors")]
    base = f"{request.url.scheme}://{request.headers.get('host', '')}/files"
    paths = {file: f"{run}/{kind}/{name}/{file}" for file in files if (folder / file).is_file()}
    urls = {file: f"{base}/{path}?expires={expires}&signature={_signed(path, expires)}" for file, path in paths.items()}
    return json_response({"urls": urls, "expires": timestamp(expires)})


def _signed(path: str, expires: int) -> str:
    return hmac.new(_SECRET, f"{path}?{expires}".encode(), hashlib.sha256).hexdigest()


async def exported_file(request: Request, run: str, kind: str, name: str, file: str) -> Response:
    """A file of an exported adapter, at an address from `external_weights_urls`."""
    expires, path = request.query_params.get("expires", "0"), f"{run}/{kind}/{name}/{file}"
    number = int(expires) if expires.isdecimal() and len(expires) < 12 else 0
    signed = hmac.compare_digest(request.query_params.get("signature", "").encode(), _signed(path, number).encode())
    if not signed or number < time.time():
        raise ApiError(403, "this address has expired, or is not one that this server has given")
    _, folder = _state(_service(request), run, f"{kind}/{name}")
    return FileResponse(folder / file)


@routes.post("/weights_info")
async def weights_info(request: Request) -> Response:
    service = _service(request)
    body = parse_body(await read_body(request, service.config.max_body_bytes), OfPath)
    state, _ = service.states.find(body.tinker_path)
    return json_response(
        {
            "base_model": state.base_model,
            "is_lora": True,
            "lora_rank": state.rank,
            "train_unembed": state.train_unembed,
            "train_mlp": state.train_mlp,
            "train_attn": state.train_attn,
        }
    )


@routes.get("/sessions")
async def sessions(request: Request) -> Response:
    found, _ = _page(request, list(reversed(_service(request).sessions)))
    return json_response({"sessions": found})


@routes.get("/sessions/{session_id}")
async def session(request: Request, session_id: str) -> Response:
    service = _service(request)
    if (found := service.sessions.get(session_id)) is None:
        raise ApiError(404, f"there is no session {session_id[:80]!r}")
    return json_response(
        {
            "training_run_ids": list(found.models),
            "sampler_ids": list(found.samplers),
            "user_metadata": found.user_metadata,
            "display_name": found.display_name,
        }
    )
