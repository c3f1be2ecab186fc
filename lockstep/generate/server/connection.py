"""uvicorn's connections, with a timeout for every wait for the client."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

READ = 2**16
"""Bytes of a body that are read in one iteration of the event loop."""
READ_UNKNOWN = 2**10
"""The same for input that may come in chunks of one byte, at 16 µs each."""


class BoundedConnection(H11Protocol):
    """Closes a connection at once if the client

    - has not sent a complete request, head and body, within `seconds` (0: no limit),
    - has not read the response for that long,
    - exceeds `max_connections`.

    uvicorn itself limits the size of the head and the time between requests.
    """

    seconds: ClassVar[float]
    max_connections: ClassVar[int]
    _reading: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # All that the kernel does not accept at once counts as unread: responses are not buffered here.
        transport.set_write_buffer_limits(high=0)
        self._read_at_once(READ_UNKNOWN)
        if len(self.connections) > self.max_connections:
            transport.abort()
        else:
            self._start_read_timeout()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_read_timeout()
        self._cancel_write_timeout()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._start_read_timeout()
        # At most the rest of a body of known length (private to h11), to read nothing of the next request.
        left = getattr(self.conn._reader, "_remaining", 0)
        self._read_at_once(min(READ, left) or READ_UNKNOWN)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._read_at_once(READ_UNKNOWN)
        self._start_read_timeout()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self._writing or self._abort_later()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_write_timeout()

    def _read_at_once(self, most: int) -> None:
        self.transport.max_size = most  # type: ignore[attr-defined]  # asyncio's transports read this much

    def _start_read_timeout(self) -> None:
        cycle: Any = self.cycle
        if self.transport.is_closing() or (cycle and not cycle.more_body and not cycle.response_complete):
            self._cancel_read_timeout()
        else:
            self._reading = self._reading or self._abort_later()

    def _cancel_read_timeout(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        self._reading = None

    def _cancel_write_timeout(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
        self._writing = None

    def _abort_later(self) -> asyncio.TimerHandle | None:
        return self.loop.call_later(self.seconds, self.transport.abort) if self.seconds else None


def bounded_connections(seconds: float, max_connections: int) -> type[asyncio.Protocol]:
    """A protocol for uvicorn, which takes a class: `BoundedConnection` with these limits."""
    limits = {"seconds": seconds, "max_connections": max_connections}
    return type("BoundedConnection", (BoundedConnection,), limits)
