"""Messages between the processes of a run: JSON with attached bytes, between peers that know the run's key.

Each side proves at the start that it knows the key. After that nothing is signed or encrypted: whoever can change
packets between the hosts can change messages. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from lockstep.errors import UserError

HEADER = struct.Struct("<IQ")
"""Lengths of a message's JSON and of its attachment, in bytes."""
NONCE = 32
HANDSHAKE_SECONDS = 10.0
PARTS = 5
"""Parts into which a timeout is divided (see `Channel._wait`)."""
RETRY_SECONDS = 0.1
"""Delay before a listener retries an accept that failed, e.g. because file descriptors ran out."""
Buffer: TypeAlias = bytes | bytearray | memoryview


class Closed(Exception):
    """The peer is gone, or does not belong to this run."""


def _never() -> bool:
    return False


class Channel:
    """A bidirectional connection. Any thread may send; one at a time receives. After Closed it is unusable."""

    def __init__(self, connection: socket.socket, key: bytes, *, called: bool):
        """called: whether this side accepted the connection; the two sides must differ.

        Raises Closed if the peer does not prove that it knows the key.
        """
        self._connection = connection
        self._sending = threading.Lock()
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        nonce = secrets.token_bytes(NONCE)
        self._write(nonce)
        other_nonce = bytes(self._read(NONCE, HANDSHAKE_SECONDS))
        # Proofs name the side that makes them: one that is sent back proves nothing.
        nonces = other_nonce + nonce if called else nonce + other_nonce
        proofs = [hmac.digest(key, side + nonces, "sha256") for side in (b"caller", b"called")]
        proof, expected = reversed(proofs) if called else proofs
        self._write(proof)
        if not hmac.compare_digest(self._read(len(expected), HANDSHAKE_SECONDS), expected):
            self.close()
            raise Closed("the keys of the two sides differ")

    def send(self, message: Any, *attachment: Buffer) -> None:
        """Sends `message` (JSON-able) and an attachment, which arrives as one piece."""
        body = json.dumps(message).encode()
        parts = [memoryview(part).cast("B") for part in attachment]
        with self._sending:
            self._write(HEADER.pack(len(body), sum(part.nbytes for part in parts)) + body)
            for part in parts:
                self._write(part)

    def receive(self, seconds: float | None = None, keep_waiting: Callable[[], bool] = _never) -> tuple[Any, bytearray]:
        """The next message and its attachment. Raises TimeoutError if none starts within `seconds`.

        Raises Closed if one stalls in the middle for that long. keep_waiting: called first in both cases; if it returns
        True, waits as long again.
        """
        if not self._wait(seconds, keep_waiting):
            raise TimeoutError
        length, attached = HEADER.unpack(self._read(HEADER.size, seconds, keep_waiting))
        body, attachment = self._read(length, seconds, keep_waiting), self._read(attached, seconds, keep_waiting)
        try:
            return json.loads(body), attachment
        except ValueError as error:
            raise Closed("it sent a message that is not JSON") from error

    def close(self) -> None:
        """Closes the connection: raises Closed in threads that wait on it, on both sides."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _wait(self, seconds: float | None, keep_waiting: Callable[[], bool]) -> bool:
        """Whether data, or the end of the connection, arrives in time."""
        # In parts: if both sides are suspended, as on a sleeping laptop, only one part expires.
        part = None if seconds is None else seconds / PARTS * 1000
        try:
            poll = select.poll()
            poll.register(self._connection, select.POLLIN)
            while not any(poll.poll(part) for _ in range(PARTS)):
                if not keep_waiting():
                    return False
        except (OSError, ValueError) as error:  # another thread has closed it
            raise Closed("the connection was closed on this side") from error
        return True

    def _read(self, length: int, seconds: float | None, keep_waiting: Callable[[], bool] = _never) -> bytearray:
        content = bytearray(length)
        view = memoryview(content)
        while view:
            if not self._wait(seconds, keep_waiting):
                raise Closed("it stopped in the middle of a message")
            try:
                count = self._connection.recv_into(view)
            except OSError as error:
                raise Closed(str(error)) from error
            if count == 0:
                raise Closed("it is gone")
            view = view[count:]
        return content

    def _write(self, part: Buffer) -> None:
        try:
            self._connection.sendall(part)
        except OSError as error:
            raise Closed(str(error)) from error


class Listener:
    """Accepts connections from the run's other processes. Listens on loopback by default."""

    def __init__(self, key: bytes, host: str = "127.0.0.1", port: int = 0):
        """Raises UserError if it cannot listen at the address."""
        try:
            self._socket = socket.create_server((host, port), backlog=128)
        except OSError as error:
            problem = f"cannot listen on {host}:{port}: {error.strerror}; choose another port or address"
            raise UserError(problem) from error
        self._key, self._closed = key, threading.Event()
        self.address: tuple[str, int] = self._socket.getsockname()[:2]

    def accept(self) -> socket.socket:
        """The next connection, before its handshake (`greet`, which may run in another thread).

        Raises Closed when the listener is closed, and only then.
        """
        while True:
            try:
                return self._socket.accept()[0]
            except OSError as error:
                # Out of memory or file descriptors: waits for current connections to end.
                if self._closed.wait(RETRY_SECONDS):
                    raise Closed(str(error)) from error

    def greet(self, caller: socket.socket) -> Channel:
        """Does the handshake. If the caller does not know the key, closes the connection and raises Closed."""
        try:
            return Channel(caller, self._key, called=True)
        except BaseException:
            caller.close()
            raise

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
