"""Error responses in the format of the API that a route belongs to: Anthropic's for `/v1/messages`, else OpenAI's."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from lockstep.generate.server.access_log import RECORD
from lockstep.generate.server.api_error import ApiError, json_response

MESSAGES = "/v1/messages"
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's type for each status; its client chooses the exception by the status, and in a stream shows the type."""


def is_anthropic(path: str) -> bool:
    """Whether a path is of Anthropic's API."""
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def error_response(error: ApiError, scope: Scope) -> Response:
    """The response to the request of `scope`."""
    if not is_anthropic(scope["path"]):
        return error.response()
    return json_response(anthropic_error(error, scope[RECORD].request_id), error.status, error.headers)


def anthropic_error(error: ApiError, request_id: str) -> dict[str, Any]:
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    problem: dict[str, Any] = {"type": kind, "message": error.message}
    if error.code is not None:
        problem["details"] = {"error_code": error.code}
    return {"type": "error", "error": problem, "request_id": request_id}
