"""Messages through a pipe: four bytes of length, then JSON. Nothing that a reward writes is ever unpickled."""

from __future__ import annotations

import json
import os
import select
import struct
import time
from typing import Any

LENGTH = struct.Struct("<I")
MOST_BYTES = 2**28


class Closed(Exception):
    """The other side is gone, or has written what is no message."""


def encode(message: Any) -> bytes:
    body = json.dumps(message).encode()
    if len(body) > MOST_BYTES:
        raise ValueError(f"a message of {len(body)} bytes; {MOST_BYTES} is the most")
    return LENGTH.pack(len(body)) + body


def take(buffer: bytearray, most_bytes: int = MOST_BYTES) -> Any:
    """The first message of `buffer`, taken out of it; None where it is not whole yet. Raises Closed."""
    if len(buffer) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack_from(buffer)
    if length > most_bytes:
        raise Closed(f"a message of {length} bytes")
    if len(buffer) < LENGTH.size + length:
        return None
    body = bytes(buffer[LENGTH.size : LENGTH.size + length])
    del buffer[: LENGTH.size + length]
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Closed(f"no JSON: {error}") from error


def send(pipe: int, message: Any, seconds: float = 60.0) -> None:
    """Writes to a non-blocking pipe. Raises Closed where it is not read for so long."""
    left = memoryview(encode(message))
    until = time.monotonic() + seconds
    while left:
        _, writable, _ = select.select([], [pipe], [], max(0.0, until - time.monotonic()))
        if not writable:
            raise Closed(f"nothing was read for {seconds:g} s")
        try:
            left = left[os.write(pipe, left) :]
        except BlockingIOError:
            continue
        except OSError as error:
            raise Closed(str(error)) from error


def receive(pipe: int, buffer: bytearray, seconds: float | None = None) -> Any:
    """The next message of a pipe; `buffer` keeps what was read beyond it. Raises Closed."""
    until = None if seconds is None else time.monotonic() + seconds
    while (message := take(buffer)) is None:
        left = None if until is None else max(0.0, until - time.monotonic())
        if not select.select([pipe], [], [], left)[0]:
            raise Closed(f"no answer for {seconds:g} s")
        if not (read := os.read(pipe, 2**16)):
            raise Closed("the end of the pipe")
        buffer += read
    return message
