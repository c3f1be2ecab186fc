"""Limits on concurrent work; requests beyond them are refused at once, and clients retry later."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from lockstep.generate.server.api_error import ApiError, shutting_down, too_busy
from lockstep.generate.server.error_shape import error_response

WORK = ("/v1/", "/api/v1/", "/tokenize", "/detokenize")
"""What the paths of requests for work begin with."""


class Limits:
    """Counts requests and sequences. Used only in the event loop's thread."""

    def __init__(self, max_requests: int, max_sequences: int, request_seconds: float):
        self.max_requests = max_requests
        self.max_sequences = max_sequences
        """Running and waiting."""
        self.request_seconds = request_seconds
        """Of each request, from its start; 0: no limit."""
        self.requests = 0
        self.sequences = 0
        self.draining = False
        """The server is shutting down: no new requests are accepted."""
        self.aborting = asyncio.Event()
        """Set when running requests are aborted as well."""

    @contextmanager
    def request(self) -> Iterator[None]:
        """Holds a slot for a request. Raises ApiError (429, or 503 when shutting down)."""
        if self.draining:
            raise shutting_down()
        if self.requests >= self.max_requests:
            raise too_busy(f"{self.requests} requests are in progress, the server's limit; try again later")
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1

    @contextmanager
    def places(self, count: int) -> Iterator[None]:
        """Holds slots for `count` sequences. Raises ApiError (429) if there are not enough."""
        if self.sequences + count > self.max_sequences:
            raise too_busy(
                f"{self.sequences} sequences are running or waiting, and {count} more exceed the server's limit of "
                f"{self.max_sequences}; try again later"
            )
        self.sequences += count
        try:
            yield
        finally:
            self.sequences -= count


class LimitRequests:
    """Accepts a request for work only if a slot is free, and keeps the slot until the response is complete."""

    def __init__(self, app: ASGIApp, limits: Limits):
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Weight updates and health checks are accepted under any load.
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].startswith(WORK):
            await self._app(scope, receive, send)
            return
        try:
            with self._limits.request():
                await self._app(scope, receive, send)
        except ApiError as error:  # the routes respond to their own
            await error_response(error, scope)(scope, receive, send)
