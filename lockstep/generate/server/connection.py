"""uvicorn's connections, with a timeout for every wait for the client.

`bounded_connections` is long because uvicorn takes a class, whose limits are its closure.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

READ = 2**16
"""Bytes of a body that are read in one iteration of the event loop."""
READ_UNKNOWN = 2**10
"""The same for input that may come in chunks of one byte, at 16 µs each."""


def bounded_connections(seconds: float, most: int) -> type[asyncio.Protocol]:
    """A protocol for uvicorn that closes a connection at once if the client

    - has not sent a complete request, head and body, within `seconds` (0: no limit),
    - has not read what was written for that long,
    - exceeds `most` connections.

    uvicorn itself limits the size of the head and the time between requests.
    """

    class BoundedConnection(H11Protocol):
        _reading: asyncio.TimerHandle | None = None
        _writing: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            # All that the kernel does not accept at once counts as unread: responses are not buffered here.
            transport.set_write_buffer_limits(high=0)
            self._read_at_once(READ_UNKNOWN)
            if len(self.connections) > most:
                transport.abort()
            else:
                self._watch_reading()

        def connection_lost(self, exc: Exception | None) -> None:
            self._read_in_time()
            self._written_in_time()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch_reading()
            # At most the rest of a body of known length (private to h11), to read nothing of the next request.
            left = getattr(self.conn._reader, "_remaining", 0)
            self._read_at_once(min(READ, left) or READ_UNKNOWN)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._read_at_once(READ_UNKNOWN)
            self._watch_reading()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._writing = self._writing or self._abort_later()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._written_in_time()

        def _read_at_once(self, most: int) -> None:
            self.transport.max_size = most  # type: ignore[attr-defined]  # asyncio's transports read this much

        def _watch_reading(self) -> None:
            cycle: Any = self.cycle
            if self.transport.is_closing() or (cycle and not cycle.more_body and not cycle.response_complete):
                self._read_in_time()
            else:
                self._reading = self._reading or self._abort_later()

        def _read_in_time(self) -> None:
            if self._reading is not None:
                self._reading.cancel()
            self._reading = None

        def _written_in_time(self) -> None:
            if self._writing is not None:
                self._writing.cancel()
            self._writing = None

        def _abort_later(self) -> asyncio.TimerHandle | None:
            return self.loop.call_later(seconds, self.transport.abort) if seconds else None

    return BoundedConnection
