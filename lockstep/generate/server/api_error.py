"""Error responses in OpenAI's format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

TYPES = {401: "authentication_error", 403: "permission_error", 408: "timeout_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A response other than 200. `param` names the field at fault; `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return json_response(self.body(), self.status, self.headers)


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """ASCII only, since UTF-8 cannot encode lone surrogates."""
    return Response(json.dumps(content), status, headers, media_type="application/json")


def too_busy(message: str) -> ApiError:
    return ApiError(429, message, code="too_busy", headers={"Retry-After": "1"})


def shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down; use another one", code="shutting_down")


def engine_failed() -> ApiError:
    return ApiError(503, "the engine has failed; see the server's log, and restart it", code="engine_failed")


def not_finite() -> ApiError:
    # The official clients retry a request after 500 unless this header forbids it.
    return ApiError(
        500,
        "the logits of this request are not finite; other requests continue. Check the weights, or load others",
        code="not_finite",
        headers={"x-should-retry": "false"},
    )


def grammar_failed(problem: str) -> ApiError:
    return ApiError(400, f"the schema or grammar cannot be followed any more: {problem}", code="grammar_failed")
