"""Concurrent requests to an HTTP server in one thread: JSON in, JSON or a stream of events out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any
from urllib.parse import urlsplit

from lockstep.errors import one_line

CONNECT_SECONDS = 5.0
HEADER_BYTES = 2**16
ERROR_BYTES = 2**16
"""Most bytes read of an error response."""
RESPONSE_BYTES = 2**24
"""Most bytes of a response, or of one event of a stream."""
DATA = b"data:"


class HttpError(Exception):
    """The server returned an error. message: the server's; code: OpenAI's name for the error, if it sent one."""

    def __init__(self, status: int, message: str, code: str = ""):
        self.status, self.message, self.code = status, one_line(message, 1000), code
        super().__init__(f"{self.message} (status {status})")


class Unreachable(Exception):
    """The server does not answer, or not in valid HTTP, or the connection broke."""


class HttpClient:
    """Sends requests to the server at `url`, each on its own connection, whose closing cancels the request."""

    def __init__(self, url: str, api_key: str = "", admin_key: str = ""):
        parts = urlsplit(url)
        self.url, self.host = url, parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host_header = parts.netloc.rpartition("@")[2]
        self._api_key, self._admin_key = api_key, admin_key

    async def call(self, method: str, path: str, body: Any = None, seconds: float | None = None) -> Any:
        """The response's JSON; None if it is not JSON. Raises HttpError, Unreachable and TimeoutError."""
        async with asyncio.timeout(seconds), self._response(method, path, body) as parts:
            content = await _at_most(parts, RESPONSE_BYTES + 1)
        if len(content) > RESPONSE_BYTES:
            raise Unreachable(f"its response to {path} has more than {RESPONSE_BYTES} bytes")
        try:
            return _read_json(content)
        except ValueError:
            return None

    async def events(self, path: str, body: Any) -> AsyncGenerator[Any, None]:
        """The server-sent events of a response, each JSON, up to `[DONE]`. Raises HttpError and Unreachable."""
        async with self._response("POST", path, body) as parts:
            rest = b""
            async for part in parts:
                *lines, rest = (rest + part).split(b"\n")
                if len(rest) > RESPONSE_BYTES:
                    raise Unreachable(f"an event of its stream has more than {RESPONSE_BYTES} bytes")
                for line in lines:
                    if not line.startswith(DATA):
                        continue
                    data = line.removeprefix(DATA).strip()
                    if data == b"[DONE]":
                        return
                    try:
                        event = _read_json(data)
                    except ValueError as error:
                        raise Unreachable(f"an event of its stream is not JSON: {data[:80]!r}") from error
                    if isinstance(event, dict) and event.get("error"):
                        raise _error_of(0, event)
                    yield event
        raise Unreachable("its stream ended before it was done")

    @contextlib.asynccontextmanager
    async def _response(self, method: str, path: str, body: Any) -> AsyncIterator[AsyncIterator[bytes]]:
        """The parts of a successful response's body."""
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(self.host, self.port, ssl=self._tls, limit=HEADER_BYTES)
            writer.write(self._request(method, path, body))
            await writer.drain()
            status, headers = await _head(reader)
            parts = _body(reader, headers)
            if status != 200:
                raise _error_of(status, await _json_of(parts))
            yield parts
        except TimeoutError:
            if writer is None:
                raise Unreachable(f"no connection within {CONNECT_SECONDS:g} s") from None
            raise
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            raise Unreachable(str(error) or type(error).__name__) from error
        finally:
            if writer is not None:
                writer.close()

    def _request(self, method: str, path: str, body: Any) -> bytes:
        content = b"" if body is None else json.dumps(body).encode()
        key = self._admin_key if path.startswith("/admin/") else self._api_key
        lines = [
            f"{method} {path} HTTP/1.1",
            f"Host: {self._host_header}",
            "Connection: close",
            "Accept: application/json, text/event-stream",
            *([f"Authorization: Bearer {key}"] if key else []),
            *(["Content-Type: application/json"] if body is not None else []),
            f"Content-Length: {len(content)}",
        ]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + content


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers, whose names are in lower case. Raises ValueError if it is not HTTP."""
    while True:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        version, _, rest = lines[0].partition(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError(f"it does not speak HTTP: {lines[0][:80]!r}")
        status = int(rest[:3])
        if status >= 200:
            pairs = (line.partition(":") for line in lines[1:] if line)
            return status, {name.strip().lower(): value.strip() for name, _, value in pairs}


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readline()).partition(b";")[0], 16):
            async for part in _exactly(reader, size):
                yield part
            await reader.readexactly(2)
    elif "content-length" in headers:
        async for part in _exactly(reader, int(headers["content-length"])):
            yield part
    else:
        while part := await reader.read(HEADER_BYTES):
            yield part


async def _exactly(reader: asyncio.StreamReader, size: int) -> AsyncIterator[bytes]:
    """Exactly this many bytes, in parts, so that the caller can stop early."""
    if size < 0:
        raise ValueError(f"a length of {size}")
    while size:
        if not (part := await reader.read(min(size, HEADER_BYTES))):
            raise EOFError("the connection ended in the middle of a response")
        size -= len(part)
        yield part


async def _at_most(parts: AsyncIterator[bytes], size: int) -> bytes:
    """The first bytes of a response."""
    content = bytearray()
    async for part in parts:
        content += part
        if len(content) >= size:
            break
    return bytes(content[:size])


def _read_json(content: bytes) -> Any:
    """Raises ValueError if it is not JSON, or nested too deep."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


async def _json_of(parts: AsyncIterator[bytes]) -> Any:
    """The JSON of an error response; its text if it is not JSON."""
    content = await _at_most(parts, ERROR_BYTES)
    try:
        return _read_json(content)
    except ValueError:
        return content[:200].decode(errors="replace")


def _error_of(status: int, content: Any) -> HttpError:
    error = content.get("error", content) if isinstance(content, dict) else content
    if not isinstance(error, dict):
        return HttpError(status, str(error)[:1000] or "no reason given")
    message = error.get("message") or error.get("detail") or json.dumps(error)
    return HttpError(status, str(message)[:1000], str(error.get("code") or ""))
