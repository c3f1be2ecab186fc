"""Access: the API key for work and metrics, the admin key for /admin and the routes that load adapters; without an API
key, only from this machine."""

from __future__ import annotations

import hmac
import ipaddress
import re

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from lockstep.generate.server.api_error import ApiError
from lockstep.generate.server.error_shape import error_response
from lockstep.generate.server.limits import WORK

ADMIN_ROUTES = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
"""Routes outside of /admin that need the admin key: the names are vLLM's."""


class RequireKeys:
    """Refuses requests without the key for their route, before any of their body is read."""

    def __init__(self, app: ASGIApp, api_key: str, admin_key: str):
        self._app = app
        self._api_key = api_key
        self._admin_key = admin_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(Request(scope)) if scope["type"] == "http" else None
        await (error_response(error, scope) if error else self._app)(scope, receive, send)

    def _refusal(self, request: Request) -> ApiError | None:
        # The path that the router uses. request.url is built from the Host header, an arbitrary string: with "x#" in
        # it, its path would be empty and need no key.
        path = request.scope["path"]
        if not self._api_key and not _is_loopback(request.headers.get("host", "")):
            return _foreign_host()
        if path.startswith("/admin/") or path in ADMIN_ROUTES:
            if not self._admin_key:
                return ApiError(404, f"no route {path[:200]}", code="not_found")
            return _compare(request, self._admin_key, "admin key")
        if self._api_key and (path.startswith(WORK) or path == "/metrics"):
            given = request.headers.get("x-api-key")  # as Anthropic's clients send it
            if given is not None and _is_key(given, self._api_key):
                return None
            return _compare(request, self._api_key, "API key")
        return None


def _is_loopback(host: str) -> bool:
    name = host.rpartition(":")[0] if re.search(r":\d*$", host) else host
    try:
        return name == "localhost" or ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def _foreign_host() -> ApiError:
    # DNS rebinding: a web page can reach this machine by letting its host name resolve to 127.0.0.1.
    return ApiError(403, "without an API key, this server only answers on localhost; use http://127.0.0.1", code="host")


def _compare(request: Request, key: str, name: str) -> ApiError | None:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and _is_key(token, key):
        return None
    message = f"send the {name} in the header Authorization: Bearer KEY"
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _is_key(given: str, key: str) -> bool:
    # Headers are decoded as Latin-1. compare_digest runs in constant time.
    return hmac.compare_digest(given.strip().encode("latin-1"), key.encode())
