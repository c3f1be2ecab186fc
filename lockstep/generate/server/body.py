"""A request's body: bounded before it is parsed, and errors that name the field."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from lockstep.generate.server.api_error import ApiError

Body = TypeVar("Body", bound=BaseModel)

MOST = {",": 2**18, '"': 2**17, ":": 2**15, "[": 2**14, "{": 2**15}
"""Of each of JSON's characters in a body, those in its texts included: parsing holds up every other client, for some
0.05 µs a number and 1 to 2 µs a text, list or object."""
LARGE = 2**14
"""Bytes. Below, parsing takes no time to speak of."""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Raises ApiError: 415 for another content type than JSON's, 413 beyond `max_bytes`."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Also keeps pages in a browser out: without asking first, they may send forms and plain text only.
    if content_type != "application/json":
        raise ApiError(415, "send JSON, with the header Content-Type: application/json")
    too_large = ApiError(
        413, f"the body is larger than {max_bytes} bytes, the server's limit", headers={"Connection": "close"}
    )
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced[:20]) > max_bytes:
        raise too_large
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > max_bytes:
            raise too_large
    return bytes(data)


async def parse_in_turn(data: bytes, kind: type[Body], parsing: asyncio.Lock) -> Body:
    """As `parse_body`. parsing: held while a large one is parsed."""
    if len(data) < LARGE:
        return parse_body(data, kind)
    async with parsing:
        # One body in a turn of the event loop: whoever asks for little is answered between two large ones.
        await asyncio.sleep(0)
        return parse_body(data, kind)


def parse_body(data: bytes, kind: type[Body]) -> Body:
    """Raises ApiError for what holds too many values, is no JSON or not a `kind`."""
    for character, most in MOST.items():
        if data.count(character.encode()) > most:
            message = f"the body has the character {character} more than {most} times; ask for less in one request"
            raise ApiError(413, message)
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise ApiError(400, _message(problem, kind), _field(problem)) from None


def _field(problem: Any) -> str | None:
    return str(problem["loc"][0])[:64] if problem["loc"] else None


def _message(problem: Any, kind: type[BaseModel]) -> str:
    name = _field(problem)
    if name is None:
        return str(problem["msg"])
    field = kind.model_fields.get(name)
    if field is not None and field.description and problem["type"] != "missing":
        return f"{name} must be {field.description}"
    where = ".".join(str(part)[:64] for part in problem["loc"])
    return f"{where}: {problem['msg']}"
