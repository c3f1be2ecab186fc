"""Messages through a pipe: four bytes of length, then JSON, never pickle, as rewards can write into the pipes."""

from __future__ import annotations

import json
import math
import os
import select
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any

PlainJob = tuple[dict[str, Any], str]
"""An example's fields, and a completion to grade."""
LENGTH = struct.Struct("<I")
MOST_BYTES = 2**28


class Closed(Exception):
    """The peer is gone, or has written something that is not a message."""


class Silent(Closed):
    """No message arrived in time."""


def chunk_of(jobs: Sequence[PlainJob]) -> dict[str, Any]:
    """Jobs as one message, in which several completions share one copy of their example."""
    examples = {id(example): example for example, _ in jobs}
    indices = {key: index for index, key in enumerate(examples)}
    return {"examples": list(examples.values()), "jobs": [[indices[id(example)], text] for example, text in jobs]}


def jobs_in(chunk: dict[str, Any]) -> list[PlainJob]:
    """The inverse of `chunk_of`."""
    return [(chunk["examples"][index], text) for index, text in chunk["jobs"]]


def encode(message: Any) -> bytes:
    """A message's bytes on the wire; a message of type `bytes` is already JSON."""
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    if len(body) > MOST_BYTES:
        raise ValueError(f"a message of {len(body)} bytes; at most {MOST_BYTES} are allowed")
    return LENGTH.pack(len(body)) + body


def take(buffer: bytearray, most_bytes: int = MOST_BYTES) -> Any:
    """Removes the first message from `buffer`; None if it is incomplete. Raises Closed if it is invalid."""
    body = take_body(buffer, most_bytes)
    return None if body is None else decode(body)


def decode(body: bytes) -> Any:
    """A message's JSON, decoded. Raises Closed if it is invalid."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Closed(f"not JSON: {error}") from error


def take_body(buffer: bytearray, most_bytes: int = MOST_BYTES) -> bytes | None:
    """As `take`, but without decoding the JSON."""
    if len(buffer) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack_from(buffer)
    if length > most_bytes:
        raise Closed(f"a message of {length} bytes")
    if len(buffer) < LENGTH.size + length:
        return None
    body = bytes(buffer[LENGTH.size : LENGTH.size + length])
    del buffer[: LENGTH.size + length]
    return body


def send(pipe: int, *messages: Any, seconds: float = 60.0) -> None:
    """Writes all messages to a non-blocking pipe at once, as each write wakes the reader. Raises Closed if the reader
    is gone, or has not read them after `seconds`."""
    left = memoryview(b"".join(map(encode, messages)))
    deadline = time.monotonic() + seconds
    while left:
        if not _ready(pipe, select.POLLOUT, max(0.0, deadline - time.monotonic())):
            raise Closed(f"nothing was read for {seconds:g} s")
        try:
            left = left[os.write(pipe, left) :]
        except BlockingIOError:
            continue
        except OSError as error:
            raise Closed(str(error)) from error


def receive(pipe: int, buffer: bytearray, seconds: float | None = None) -> Any:
    """The next message of a pipe; bytes read beyond it stay in `buffer`. Raises Closed, and Silent after `seconds`."""
    return decode(receive_body(pipe, buffer, seconds))


def receive_body(pipe: int, buffer: bytearray, seconds: float | None = None) -> bytes:
    """As `receive`, but without decoding the JSON. After Silent it can be called again."""
    deadline = None if seconds is None else time.monotonic() + seconds
    while (message := take_body(buffer)) is None:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not _ready(pipe, select.POLLIN, left):
            raise Silent(f"no answer for {seconds:g} s")
        if not (read := os.read(pipe, 2**16)):
            raise Closed("end of the pipe")
        buffer += read
    return message


def _ready(pipe: int, event: int, seconds: float | None) -> bool:
    """Waits for a pipe. Uses poll, as select does not support descriptors above 1023."""
    poll = select.poll()
    poll.register(pipe, event)
    return bool(poll.poll(None if seconds is None else math.ceil(1000 * seconds)))


class Stream:
    """One end of a non-blocking pipe or socket, with its buffers of received and unsent bytes."""

    def __init__(self, reads: int, writes: int):
        self.reads, self.writes = reads, writes
        for end in {reads, writes}:
            os.set_blocking(end, False)
        self.inbox, self.outbox = bytearray(), bytearray()

    def put(self, message: Any) -> None:
        """Queues a message, and writes as much as possible without blocking; `flush` writes the rest."""
        self.outbox += encode(message)
        self.flush()

    def flush(self) -> None:
        """Writes as much as possible without blocking. Raises Closed if the reader is gone."""
        try:
            while self.outbox:
                del self.outbox[: os.write(self.writes, self.outbox[: 2**20])]
        except BlockingIOError:
            pass
        except OSError as error:
            raise Closed(str(error)) from error

    def messages(self, most_bytes: int = MOST_BYTES) -> Iterator[Any]:
        """The complete messages received so far. Raises Closed at the end of the stream."""
        try:
            read = os.read(self.reads, 2**20)
        except BlockingIOError:
            read = None
        except OSError as error:
            raise Closed(str(error)) from error
        self.inbox += read or b""
        while (message := take(self.inbox, most_bytes)) is not None:
            yield message
        if read == b"":
            raise Closed("end of the pipe")

    def events(self) -> list[tuple[int, int]]:
        """(descriptor, event) pairs to poll for."""
        return [(self.reads, select.POLLIN)] + ([(self.writes, select.POLLOUT)] if self.outbox else [])
