"""Cancels work for a client if the client disconnects or a deadline passes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lockstep.generate.server.access_log import record_of
from lockstep.generate.server.api_error import ApiError, shutting_down
from lockstep.generate.server.limits import Limits
from lockstep.generate.server.responses import ReplyWriter

Result = TypeVar("Result")


class ClientGone(Exception):
    """The client has disconnected."""


async def watch(
    request: Request,
    work: Coroutine[Any, Any, Result],
    limits: Limits,
    reads_body: bool = False,
) -> Result:
    """Returns the result of `work`, if it ends while the client is connected and within the time of its request.

    reads_body: `work` reads the request's body, and so detects a disconnect itself; otherwise the body must have been
    read. Raises ClientGone, or ApiError (408, or 503 when the server aborts running requests).
    """
    record = record_of(request)
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(asyncio.Event().wait() if reads_body else _disconnected(request.receive))
    ending = asyncio.ensure_future(limits.aborting.wait())
    left = max(0.0, limits.request_seconds - record.seconds) if limits.request_seconds else None
    try:
        await asyncio.wait({task, gone, ending}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            record.aborted = "disconnected"
            raise ClientGone
        if ending.done():
            record.aborted = "shutdown"
            raise shutting_down()
        record.aborted = "deadline"
        raise deadline_passed(limits.request_seconds)
    except asyncio.CancelledError:  # by the server's shutdown, for a client that stopped reading
        record.aborted = "shutdown"
        raise
    finally:
        task.cancel()
        gone.cancel()
        ending.cancel()
        await asyncio.wait({task, gone, ending})


def deadline_passed(limit_seconds: float) -> ApiError:
    # The official clients retry a request after 408 unless this header forbids it.
    return ApiError(
        408,
        f"the request took longer than {limit_seconds} seconds, the server's limit; ask for fewer tokens",
        code="deadline",
        headers={"x-should-retry": "false"},
    )


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. An error after the first event is sent as the reply's own event, and nothing after it.

    `source`, from which `events` reads, is always closed, even if the first event was never requested.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        request: Request,
        events: AsyncGenerator[str, None],
        source: AsyncGenerator[Any, None],
        reply: ReplyWriter,
        limits: Limits,
    ):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._request, self._events, self._source = request, events, source
        self._reply, self._limits = reply, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._source), aclosing(self._events):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await watch(self._request, self._send_events(send), self._limits)
            except ClientGone:
                return
            except ApiError as error:
                # First abort the sequences: the client may not read the error.
                await self._events.aclose()
                await self._source.aclose()
                await _send_part(send, self._reply.error(error), more=True)
            await _send_part(send, "", more=False)

    async def _send_events(self, send: Send) -> None:
        async for events in self._events:
            await _send_part(send, events, more=True)


async def _send_part(send: Send, text: str, more: bool) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": more})
