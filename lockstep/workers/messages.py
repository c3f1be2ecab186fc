"""Messages through pipes: four bytes of length, then a body, usually JSON.

Never `pickle.loads` from a process that runs foreign code or parses foreign files: these can write into its pipes.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import select
import struct
import time
from collections.abc import Iterator
from typing import Any

LENGTH = struct.Struct("<I")
MAX_BYTES = 2**28


class Closed(Exception):
    """The peer is gone or silent, or has written something that is not a message."""


def to_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def from_json(body: bytes) -> Any:
    """The value of a message's body. Raises Closed if it is not JSON."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Closed(f"not JSON: {error}") from error


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "str"):
            return str  # harmless, and what a sender may write in place of other objects
        raise pickle.UnpicklingError(f"a pickle with {module}.{name}")


def from_plain(body: bytes) -> Any:
    """The value of a pickle of plain types alone, which runs no code. Raises Closed if it is anything else."""
    try:
        return _PlainUnpickler(io.BytesIO(body)).load()
    except Exception as error:  # damaged pickles raise anything
        raise Closed(f"not a plain pickle: {error}") from error


class Stream:
    """One end of a pair of pipes, or of a socket. One thread may send while another receives."""

    def __init__(self, reads: int, writes: int, max_bytes: int = MAX_BYTES):
        """max_bytes: of a message that is received."""
        self.reads, self.writes, self.max_bytes = reads, writes, max_bytes
        os.set_blocking(writes, False)
        self._inbox, self.unsent = bytearray(), bytearray()

    def put(self, body: bytes) -> None:
        """Queues a message, and writes as much as possible without blocking; `flush` writes the rest."""
        self.unsent += LENGTH.pack(len(body)) + body
        self.flush()

    def flush(self) -> None:
        """Writes as much as possible without blocking. Raises Closed if the reader is gone."""
        try:
            while self.unsent:
                with memoryview(self.unsent) as unsent:
                    written = os.write(self.writes, unsent[: 2**20])
                del self.unsent[:written]
        except BlockingIOError:
            pass
        except OSError as error:
            raise Closed(str(error)) from error

    def send(self, body: bytes, seconds: float | None = 60.0) -> None:
        """Sends a message. Raises Closed if the reader is gone, or has not read it after `seconds`."""
        deadline = None if seconds is None else time.monotonic() + seconds
        self.put(body)
        while self.unsent:
            if not _ready(self.writes, select.POLLOUT, deadline):
                raise Closed(f"nothing was read for {seconds:g} s")
            self.flush()

    def receive(self, seconds: float | None = None) -> bytes:
        """The next message. Raises Closed, also after `seconds`."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while (body := self._take()) is None:
            if (deadline is not None or self.reads == self.writes) and not _ready(self.reads, select.POLLIN, deadline):
                raise Closed(f"no answer for {seconds:g} s")
            if not self._read():  # waits, unless it is a socket
                raise Closed("end of the pipe")
        return body

    def received(self) -> Iterator[bytes]:
        """The messages that have arrived, once there is something to read. Raises Closed at the end of the stream."""
        is_open = self._read()
        while (body := self._take()) is not None:
            yield body
        if not is_open:
            raise Closed("end of the pipe")

    def events(self) -> dict[int, int]:
        """What to poll for, by descriptor."""
        events = {self.reads: select.POLLIN}
        if self.unsent:
            events[self.writes] = events.get(self.writes, 0) | select.POLLOUT
        return events

    def _read(self) -> bool:
        """Reads what has arrived; returns whether there may be more."""
        try:
            data = os.read(self.reads, 2**16)
        except BlockingIOError:
            return True
        except OSError as error:
            raise Closed(str(error)) from error
        self._inbox += data
        return bool(data)

    def _take(self) -> bytes | None:
        """Removes the first message from the inbox; None if it is incomplete."""
        if len(self._inbox) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._inbox)
        if length > self.max_bytes:
            raise Closed(f"a message of {length} bytes")
        if len(self._inbox) < LENGTH.size + length:
            return None
        body = bytes(self._inbox[LENGTH.size : LENGTH.size + length])
        del self._inbox[: LENGTH.size + length]
        return body


def _ready(end: int, event: int, deadline: float | None) -> bool:
    """Waits for a pipe. Uses poll, as select does not support descriptors above 1023."""
    poll = select.poll()
    poll.register(end, event)
    left = None if deadline is None else max(0, math.ceil(1000 * (deadline - time.monotonic())))
    return bool(poll.poll(left))
