"""Protobuf bodies, compressed or not, limited in size before and after."""

from __future__ import annotations

from starlette.requests import Request

from lockstep.generate.server.api_error import ApiError
from lockstep.train_server.wire import CONTENT_TYPE

try:
    import zstandard
except ImportError:
    zstandard = None  # type: ignore[assignment]
CAN_DECOMPRESS = zstandard is not None


async def read_protobuf(request: Request, max_bytes: int) -> bytes:
    """Raises ApiError: 415 for another content type or encoding, 413 for more than `max_bytes`."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != CONTENT_TYPE:
        raise ApiError(415, f"send protobuf, with the header Content-Type: {CONTENT_TYPE}")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "zstd") or (encoding == "zstd" and not CAN_DECOMPRESS):
        raise ApiError(415, f"the body is sent with Content-Encoding: {encoding[:60]}; send it unencoded")
    too_large = ApiError(
        413,
        f"the body is larger than {max_bytes} bytes, the server's limit; send less data in one call, or start the "
        "server with a larger --max-body-bytes",
        headers={"Connection": "close"},
    )
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced[:20]) > max_bytes:
        raise too_large
    received = bytearray()
    async for part in request.stream():
        received += part
        if len(received) > max_bytes:
            raise too_large
    if encoding == "identity":
        return bytes(received)
    reader = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(bytes(received))
    try:
        data = reader.read(max_bytes + 1)
    except zstandard.ZstdError as error:
        raise ApiError(400, f"the body is not zstd ({error})") from error
    if len(data) > max_bytes:
        raise too_large
    return data
