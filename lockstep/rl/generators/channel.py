"""Messages between the processes of a run: JSON with attached bytes, each signed with the run's key.

Nothing is unpickled, and only a peer's greeting is read before it has proved that it knows the key. Messages are not
encrypted, but changing, repeating or omitting one is detected.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from lockstep.errors import UserError

HEADER = struct.Struct("<IQ")
"""Lengths of a message's JSON and of its attachment, in bytes."""
NONCE = 32
TAG = 32
HANDSHAKE_SECONDS = 10.0
PARTS = 5
"""Parts into which a timeout is divided (see `_begin`)."""
MOST_JSON = 2**28
"""Most bytes of a message's JSON."""
MAX_UNGREETED = 64
"""Most connections of a listener before their handshake; beyond it, the oldest is dropped."""
RETRY_SECONDS = 0.1
"""Delay before a listener retries an accept that failed, e.g. because file descriptors ran out."""
Buffer: TypeAlias = bytes | bytearray | memoryview


class Closed(Exception):
    """The peer is gone, or does not belong to this run."""


class Malformed(Closed):
    """The peer knows the key, but sent something that is not a message."""


class Channel:
    """A bidirectional connection. Any thread may send; one at a time receives. After Closed it is unusable."""

    def __init__(self, connection: socket.socket, key: bytes, *, called: bool):
        """called: whether this side accepted the connection; the two sides must differ.

        Raises Closed if the peer does not prove within `HANDSHAKE_SECONDS` that it knows the key.
        """
        self._connection = connection
        self._sending = threading.Lock()
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(HANDSHAKE_SECONDS)
        until = time.monotonic() + HANDSHAKE_SECONDS
        own_nonce = secrets.token_bytes(NONCE)
        self._write(own_nonce)
        other_nonce = bytes(self._read(NONCE, lambda: self._wait_until(until)))
        # A key per connection and direction, so that replayed and reflected messages are invalid.
        nonces = (other_nonce, own_nonce) if called else (own_nonce, other_nonce)
        keys = [_signed(key, name, *nonces) for name in (b"from the caller", b"from the called")]
        self._send_key, self._receive_key = reversed(keys) if called else keys
        self._sent = self._received = 0
        self._write(_signed(self._send_key, b"greeting"))
        greeting = self._read(TAG, lambda: self._wait_until(until))
        if not hmac.compare_digest(greeting, _signed(self._receive_key, b"greeting")):
            self.close()
            raise Closed("it does not have the key of this run")
        # A socket timeout would also apply to sends of another thread.
        connection.settimeout(None)

    def send(self, message: Any, *attachment: Buffer) -> None:
        """Sends `message` (JSON-able) and an attachment, which arrives as one piece."""
        body = json.dumps(message).encode()
        parts = [memoryview(part).cast("B") for part in attachment]
        header = HEADER.pack(len(body), sum(part.nbytes for part in parts))
        with self._sending:
            tag = _signed(self._send_key, self._sent.to_bytes(8, "little"), header, body, *parts)
            self._sent += 1
            self._write(header + body)
            for part in parts:
                self._write(part)
            self._write(tag)

    def receive(
        self, seconds: float | None = None, keep_waiting: Callable[[], bool] = lambda: False
    ) -> tuple[Any, bytearray]:
        """The next message and its attachment. Raises TimeoutError if none starts within `seconds`.

        Raises Closed if one stalls in the middle for that long. keep_waiting: called first in both cases; if it returns
        True, waits as long again.
        """

        def wait() -> None:
            while not self._arrives(seconds):
                if not keep_waiting():
                    raise Closed("it stopped in the middle of a message")

        self._begin(seconds, keep_waiting)
        header = self._read(HEADER.size, wait)
        length, attachment_length = HEADER.unpack(header)
        if length > MOST_JSON:
            raise Closed(f"it announced a message of {length} bytes, more than any message has")
        try:
            body, attachment = self._read(length, wait), self._read(attachment_length, wait)
        except (MemoryError, OverflowError) as error:
            raise Closed(f"not enough memory for a message of {attachment_length} bytes") from error
        expected = _signed(self._receive_key, self._received.to_bytes(8, "little"), header, body, attachment)
        self._received += 1
        if not hmac.compare_digest(self._read(TAG, wait), expected):
            self.close()
            raise Closed("a message was altered in transit")
        try:
            return json.loads(body), attachment
        except (ValueError, RecursionError) as error:
            raise Malformed(f"a message that is not JSON ({type(error).__name__})") from error

    def _begin(self, seconds: float | None, keep_waiting: Callable[[], bool]) -> None:
        # In parts: if both sides are suspended, as on a sleeping laptop, only one part expires.
        part = None if seconds is None else seconds / PARTS
        while not any(self._arrives(part) for _ in range(PARTS)):
            if not keep_waiting():
                raise TimeoutError

    def _arrives(self, seconds: float | None) -> bool:
        """Whether data, or the end of the connection, arrives within that time."""
        try:
            poll = select.poll()
            poll.register(self._connection, select.POLLIN)
            return bool(poll.poll(None if seconds is None else max(0.0, seconds) * 1000))
        except (OSError, ValueError) as error:  # another thread has closed it
            raise Closed("the connection was closed on this side") from error

    def _wait_until(self, until: float) -> None:
        if not self._arrives(until - time.monotonic()):
            raise Closed(f"it did not complete the handshake within {HANDSHAKE_SECONDS:g} s")

    def close(self) -> None:
        """Closes the connection: raises Closed in threads that wait on it, on both sides."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _write(self, part: Buffer) -> None:
        try:
            self._connection.sendall(part)
        except OSError as error:
            raise Closed(str(error)) from error

    def _read(self, length: int, wait: Callable[[], None]) -> bytearray:
        """wait: returns once data has arrived, or raises."""
        content = bytearray(length)
        view = memoryview(content)
        while view:
            wait()
            try:
                count = self._connection.recv_into(view)
            except OSError as error:
                raise Closed(str(error)) from error
            if count == 0:
                raise Closed("it is gone")
            view = view[count:]
        return content


class Listener:
    """Accepts connections from the run's other processes. Listens on loopback by default."""

    def __init__(self, key: bytes, host: str = "127.0.0.1", port: int = 0):
        """Raises UserError if it cannot listen at the address."""
        try:
            self._socket = socket.create_server((host, port), backlog=128)
        except OSError as error:
            problem = f"cannot listen on {host}:{port}: {error.strerror}; choose another port or address"
            raise UserError(problem) from error
        self._key = key
        self._closed = threading.Event()
        self._changing, self._ungreeted = threading.Lock(), dict[socket.socket, None]()
        self.address: tuple[str, int] = self._socket.getsockname()[:2]

    def accept(self) -> socket.socket:
        """The next connection, before its handshake (`greet`, which may run in another thread).

        Raises Closed when the listener is closed, and only then.
        """
        while True:
            try:
                caller = self._socket.accept()[0]
            except OSError as error:
                # Out of memory or file descriptors: waits for current connections to end.
                if self._closed.wait(RETRY_SECONDS):
                    raise Closed(str(error)) from error
                continue
            with self._changing:
                self._ungreeted[caller] = None
                if len(self._ungreeted) > MAX_UNGREETED:
                    longest = next(iter(self._ungreeted))
                    del self._ungreeted[longest]
                    with contextlib.suppress(OSError):
                        longest.shutdown(socket.SHUT_RDWR)
            return caller

    def greet(self, caller: socket.socket) -> Channel:
        """Does the handshake. If the caller does not know the key, closes the connection and raises Closed."""
        try:
            return Channel(caller, self._key, called=True)
        except BaseException:
            caller.close()
            raise
        finally:
            with self._changing:
                self._ungreeted.pop(caller, None)

    def close(self) -> None:
        """Stops listening; a waiting `accept` raises Closed."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def call(host: str, port: int, key: bytes, seconds: float = HANDSHAKE_SECONDS) -> Channel:
    """Connects to a listener. Raises Closed if none that knows the key answers."""
    try:
        connection = socket.create_connection((host, port), timeout=seconds)
    except OSError as error:
        raise Closed(f"{host}:{port} does not answer: {error}") from error
    return Channel(connection, key, called=False)


def make_key(path: Path) -> bytes:
    """A new key, stored in a file that only this user can read."""
    key = secrets.token_bytes(32)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(key.hex())
    return key


def read_key(path: Path) -> bytes:
    """The key in a file that `make_key` wrote. Raises UserError if there is none, or other users can read it."""
    try:
        if path.stat().st_mode & 0o077:
            raise UserError(f"{path}: other users can read this key; chmod 600 it, and restart the run for a new one")
        return key_of(path.read_text(), str(path))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not the key of a run ({error}); give the file that the run wrote") from error


def key_of(text: str, source: str) -> bytes:
    """The key in `text`, which comes from `source`. Raises UserError if it is not a key."""
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != 32:
        raise UserError(f"{source}: not the key of a run; give the file that the run wrote")
    return key


def _signed(key: bytes, *parts: Buffer) -> bytes:
    digest = hashlib.blake2b(key=key, digest_size=TAG)
    for part in parts:
        digest.update(part)
    return digest.digest()
