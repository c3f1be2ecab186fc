"""Chats: from messages to the prompt that the model's template makes of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lockstep.data.chat import ChatTemplate, ChatTemplateError, readable_values
from lockstep.data.messages import SHOWN_REASONING
from lockstep.errors import closest
from lockstep.generate.server.answer import LONG_TEXT, answer, check_count, check_text, encode, truncated
from lockstep.generate.server.api_error import ApiError
from lockstep.generate.server.history import one_call_each, ordered
from lockstep.generate.server.protocol import ChatRequest, Message
from lockstep.generate.server.reasoning import effort_values
from lockstep.generate.server.service import Service
from lockstep.generate.server.tools import ReplyPlan

LONG_CHAT = 64
"""Messages, parts, calls and tools; chats with more are rendered one at a time, even if their text is short."""
MOST_OF_VALUES = 2**16
"""Most characters of a request's template values as JSON: a template may write them in every message."""


async def chat(service: Service, request: Request, body: ChatRequest) -> Response:
    """POST /v1/chat/completions."""
    check_count(service, 1, body.n or 1)
    plan = plan_of(service, body)
    prompt = await chat_prompt(service, body.messages, template_values(service, body), plan)
    prompt = truncated(service, body, prompt)
    max_tokens = body.max_completion_tokens or body.max_tokens or default_length(service, prompt)
    top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return await answer(service, request, body, [prompt], max_tokens, top_logprobs, plan, chat=True)


def plan_of(service: Service, body: ChatRequest) -> ReplyPlan:
    """Raises ApiError for a model without a chat template, and as `ChatRequest.plan`."""
    require_template(service)
    return body.plan(service)


def template_values(service: Service, body: ChatRequest) -> dict[str, Any]:
    """Raises ApiError as `effort_values`."""
    return effort_values(service, body.reasoning_effort, "reasoning_effort") | (body.chat_template_kwargs or {})


def default_length(service: Service, prompt: list[int]) -> int:
    """The most new tokens of a reply whose request does not say: the model's own limit, or the rest of the context."""
    room = max(1, service.context - len(prompt))
    limit: int = min(room, service.sampling_defaults.get("max_tokens", room))
    return limit


def require_template(service: Service) -> ChatTemplate:
    """The model's chat template. Raises ApiError if it has none."""
    if service.template is None:
        raise ApiError(
            400,
            "this model's folder has no chat template; use /v1/completions, or put a chat_template.jinja next to its "
            "weights",
            code="no_chat_template",
        )
    return service.template


async def chat_prompt(
    service: Service, messages: Sequence[Message], values: dict[str, Any], plan: ReplyPlan, field: str = "messages"
) -> list[int]:
    """The tokens of a chat as the model's template renders it. values: of the template. field: the request's with the
    messages, for errors. Raises ApiError."""
    template = require_template(service)
    count = len(plan.tools) + sum(map(_parts, messages))
    work = partial(_plain, service, template, messages, values, plan, field)
    plain, values, characters = work() if count < LONG_CHAT else await service.in_turn(work)
    render = partial(template.render, plain, **values)
    try:
        small = characters < LONG_TEXT and count < LONG_CHAT
        text = await (asyncio.to_thread if small else service.in_turn)(render)
    except ChatTemplateError as error:
        raise ApiError(400, str(error), field, "chat_template") from error
    _check_encodable(text, field)
    (prompt,) = await encode(service, [text], field)
    return prompt


def _parts(message: Message) -> int:
    """What a message costs to prepare: itself, and each part and call."""
    parts = len(message.content) if isinstance(message.content, list) else 0
    return 1 + parts + len(message.tool_calls or ())


def _plain(
    service: Service,
    template: ChatTemplate,
    messages: Sequence[Message],
    values: dict[str, Any],
    plan: ReplyPlan,
    field: str,
) -> tuple[list[dict[str, Any]], dict[str, Any], int]:
    """Messages and values as the template expects them, and most of the characters that it may write. Raises
    ApiError."""
    messages = ordered(messages, field)
    if service.call_layout is not None and not service.call_layout.parallel:
        messages = one_call_each(messages)
    try:
        plain = [message.plain(service.between, service.call_layout) for message in messages]
    except ChatTemplateError as error:
        raise ApiError(400, str(error), field, "chat_template") from error
    if not service.shows_developer:
        plain = [message | {"role": "system"} if message["role"] == "developer" else message for message in plain]
    of_values = _size_of(template, values)
    if tools := plan.described:
        values, of_values = values | {"tools": tools}, of_values + len(json.dumps(tools))
    # Reasoning has two keys, of which a template writes one.
    characters = sum(len(m["content"] or "") + len(m.get(SHOWN_REASONING[0], "")) for m in plain)
    characters += sum(len(json.dumps(m["tool_calls"])) for m in plain if "tool_calls" in m)
    check_text(service, characters, field)
    # A template may write the values in every message.
    return plain, values, characters + of_values * len(plain)


def _check_encodable(text: str, field: str) -> None:
    """Raises ApiError for halves of surrogate pairs, which JSON within a body's texts, such as a call's arguments, may
    have: the body itself cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])[1:-1]
        message = f"{field}: the arguments of a call contain {half}, half of a surrogate pair, which is no character"
        raise ApiError(400, message, field) from error


def _size_of(template: ChatTemplate, values: dict[str, Any]) -> int:
    """The size in characters of a request's values for its chat template. Raises ApiError for one that the template
    does not read, and if they are too large."""
    field, readable = "chat_template_kwargs", readable_values(template)
    for name in values:
        if name not in readable:
            hint = closest(name[:64], readable) or " Remove it"
            raise ApiError(400, f"{field}: the model's chat template takes no {name[:64]!r}.{hint}", field)
    size = len(json.dumps(values, ensure_ascii=False))
    if size > MOST_OF_VALUES:
        raise ApiError(400, f"{field} has {size} characters, more than {MOST_OF_VALUES}", field)
    return size
