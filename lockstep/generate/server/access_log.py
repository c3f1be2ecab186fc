"""Access log: one JSON line per request, its id in the response header, and its times in the metrics."""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lockstep.generate.server.metrics import Metrics

RECORD = "lockstep.record"
"""The key of a request's record in its scope."""
DISCONNECTED = 499
"""Status of a request whose client disconnected before the response began, as in nginx."""
SAFE_ID = re.compile(r"[\x21-\x7e]{1,128}")

logger = logging.getLogger("lockstep.access")


@dataclass
class RequestRecord:
    """A request's line in the log; filled in by the routes."""

    request_id: str
    started: float = field(default_factory=time.perf_counter)
    status: int = 0
    stream: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_token: float | None = None
    """Seconds from the start."""
    aborted: str | None = None
    """Why it was aborted: disconnected, deadline, shutdown or failure."""

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started


def record_of(request: Request) -> RequestRecord:
    record: RequestRecord = request.scope[RECORD]
    return record


class AccessLog:
    """The outermost layer: logs every request and its outcome."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(_request_id(Request(scope)))
        scope[RECORD] = record

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                # Anthropic's clients read the second.
                names = (b"x-request-id", b"request-id")
                message["headers"] = [*message["headers"], *((name, record.request_id.encode()) for name in names)]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._finish(scope, record)

    def _finish(self, scope: Scope, record: RequestRecord) -> None:
        status = record.status or (DISCONNECTED if record.aborted == "disconnected" else 500)
        # The route's pattern, not the path: a client must not be able to create new time series.
        route = getattr(scope.get("route"), "path", "other")
        self._metrics.finished(route, status, record.aborted)
        line = {
            "time": round(time.time(), 3),
            "request_id": record.request_id,
            "method": scope["method"],
            "path": scope["path"][:200],
            "status": status,
            "aborted": record.aborted,
            "stream": record.stream,
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": record.completion_tokens,
            "seconds": round(record.seconds, 4),
            "first_token_seconds": None if record.first_token is None else round(record.first_token, 4),
        }
        logger.info(json.dumps(line))


def _request_id(request: Request) -> str:
    client_id = request.headers.get("x-request-id", "")
    return client_id if SAFE_ID.fullmatch(client_id) else f"req-{secrets.token_hex(12)}"
