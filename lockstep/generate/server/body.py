"""Request bodies: limited in size before parsing, with errors that name the field."""

from __future__ import annotations

import difflib
import itertools
from typing import Any, Protocol, TypeVar, get_args, runtime_checkable

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from lockstep.generate.server.api_error import ApiError

Body = TypeVar("Body", bound=BaseModel)

MOST = {",": 2**18, '"': 2**17, ":": 2**15, "[": 2**14, "{": 2**15}
"""The most occurrences of JSON's characters in a body, including those in strings: parsing blocks every other client,
for about 0.05 µs per number and 1 to 2 µs per string, list or object."""
LARGE = 2**14
"""In bytes. Parsing a smaller body takes negligible time."""


@runtime_checkable
class Checked(Protocol):
    """A body with fields of which some are ignored, and some refused."""

    def check_fields(self) -> None: ...


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Raises ApiError: 415 for a content type other than JSON's, 413 for more than `max_bytes`."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Also a defense against web pages: without a CORS preflight, a browser sends only forms and plain text.
    if content_type != "application/json":
        raise ApiError(415, "send JSON, with the header Content-Type: application/json")
    encodings = ",".join(request.headers.getlist("content-encoding")).lower().split(",")
    if encoding := next((name for name in map(str.strip, encodings) if name not in ("", "identity")), ""):
        raise ApiError(415, f"the body is sent with Content-Encoding: {encoding[:60]}; send it unencoded")
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


def parse_body(data: bytes, kind: type[Body]) -> Body:
    """Raises ApiError if the body has too many values, is not JSON, is not a `kind`, or has fields that are refused."""
    for character, most in MOST.items():
        if data.count(character.encode()) > most:
            message = f"the body contains the character {character} more than {most} times; send less in one request"
            raise ApiError(413, message)
    try:
        body = kind.model_validate_json(data)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        code = "unknown_parameter" if problem["type"] == "extra_forbidden" else None
        raise ApiError(400, _message(problem, kind), _field(problem), code) from None
    if isinstance(body, Checked):
        body.check_fields()
    return body


def _field(problem: Any) -> str | None:
    return str(problem["loc"][0])[:64] if problem["loc"] else None


def _message(problem: Any, kind: type[BaseModel]) -> str:
    name = _field(problem)
    if name is None:
        return str(problem["msg"])
    # A type of a union whose name is in parentheses is no field.
    location = tuple(part for part in problem["loc"] if not str(part).startswith("("))
    path = [str(part)[:64] for part in location]
    if problem["type"] == "extra_forbidden":
        return f"unknown field {'.'.join(path)!r}; there are: {', '.join(kind.model_fields)}"
    if problem["type"] == "missing":
        present = [str(name)[:64] for name in itertools.islice(problem["input"], 64)]
        near = difflib.get_close_matches(path[-1], present, n=1)
        return f"{'.'.join(path)} is missing" + (f"; there is {near[0]!r}" if near else "")
    if described := _described(location, kind):
        length, description = described
        return f"{'.'.join(path[:length])} must be {description}"
    return f"{'.'.join(path)}: {problem['msg']}"


def _described(path: tuple[int | str, ...], kind: type[BaseModel]) -> tuple[int, str] | None:
    """The description of the innermost field on a path that has one, and the length of the path to it."""
    innermost, inner = None, None
    for length, part in enumerate(path, 1):
        if isinstance(part, int):
            innermost = None if inner else innermost  # wrong is something about this item
            continue
        # A field whose name pydantic has taken ends with an underscore here.
        if (field := kind.model_fields.get(part) or kind.model_fields.get(f"{part}_")) is None:
            break  # what follows names a type of a union
        innermost = (length, field.description) if field.description else None
        if (inner := _model_in(field.annotation)) is None:
            break
        kind = inner
    return innermost


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The pydantic model of a field's value or list items; None if there is none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := _model_in(part))), None)
