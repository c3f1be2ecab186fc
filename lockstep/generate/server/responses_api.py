"""OpenAI's `/v1/responses`: conversations whose turns are items, and which the server can remember."""

from __future__ import annotations

import json
import secrets
import time
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from lockstep.generate.server.answer import answer, truncated
from lockstep.generate.server.api_error import ApiError, json_response
from lockstep.generate.server.chats import LONG_CHAT, chat_prompt, default_length, require_template
from lockstep.generate.server.protocol import Message
from lockstep.generate.server.reasoning import effort_values
from lockstep.generate.server.responses_body import ResponsesRequest
from lockstep.generate.server.responses_items import messages_of
from lockstep.generate.server.responses_reply import ResponsesReply
from lockstep.generate.server.service import Service

MOST_MESSAGES = 4096
"""Of a conversation, with those of its previous responses."""


async def respond(service: Service, request: Request, body: ResponsesRequest) -> Response:
    """POST /v1/responses."""
    require_template(service)
    history = _history(service, body)
    large = len(body.input) >= LONG_CHAT and not isinstance(body.input, str)
    work = partial(messages_of, body.input, service.between)
    new = await service.in_turn(work) if large else work()
    instructions = [Message(role="system", content=body.instructions)] if body.instructions else []
    messages = [*instructions, *history, *new]
    if not messages:
        raise ApiError(400, "input is empty; send at least one message", "input")
    if len(messages) > MOST_MESSAGES:
        raise ApiError(400, f"the conversation has {len(messages)} messages, more than {MOST_MESSAGES}", "input")
    plan = body.plan(service)
    effort = body.reasoning.effort if body.reasoning is not None else None
    values = effort_values(service, effort, "reasoning.effort") | (body.chat_template_kwargs or {})
    prompt = truncated(service, body, await chat_prompt(service, messages, values, plan, "input"))
    max_tokens = body.max_output_tokens or default_length(service, prompt)
    top_logprobs = (body.top_logprobs or 0) if body.includes_logprobs else None
    response_id = f"resp_{secrets.token_hex(24)}"

    def keep(content: str, message: Message) -> None:
        service.responses.put(response_id, content, (*history, *new, message))

    reply = ResponsesReply(
        id=response_id,
        created=int(time.time()),
        head=await _head(service, body),
        tokenizer=service.tokenizer,
        top_logprobs=top_logprobs,
        structure=plan.form.ids,
        keep=None if body.store is False else keep,
    )
    return await answer(service, request, body, [prompt], max_tokens, top_logprobs, plan, chat=True, writer=reply)


def retrieve(service: Service, request: Request, response_id: str) -> Response:
    """GET /v1/responses/ID."""
    if request.query_params.get("stream", "false") != "false":
        raise ApiError(400, "stream is not supported here; retrieve the response as a whole", "stream")
    stored = service.responses.get(response_id)
    if stored is None:
        raise _unknown(404, f"Response with id {response_id[:128]!r} not found.")
    return Response(stored.content, media_type="application/json")


def delete(service: Service, response_id: str) -> Response:
    """DELETE /v1/responses/ID."""
    if not service.responses.delete(response_id):
        raise _unknown(404, f"Response with id {response_id[:128]!r} not found.")
    return json_response({"id": response_id, "object": "response", "deleted": True})


def _unknown(status: int, message: str, param: str | None = None, code: str = "not_found") -> ApiError:
    why = "This server keeps responses in memory, for a limited time, unless they were sent with store: false"
    return ApiError(status, f"{message} {why}", param, code)


def _history(service: Service, body: ResponsesRequest) -> tuple[Message, ...]:
    """The conversation that the request continues. Raises ApiError for a response that is not stored."""
    if body.previous_response_id is None:
        return ()
    stored = service.responses.get(body.previous_response_id)
    if stored is None:
        message = f"Previous response with id {body.previous_response_id!r} not found."
        raise _unknown(400, message, "previous_response_id", "previous_response_not_found")
    return stored.messages


async def _head(service: Service, body: ResponsesRequest) -> dict[str, str]:
    """What a response repeats of its request, as JSON."""
    large = len(body.tools or ()) >= LONG_CHAT
    work = partial(_repeated, service, body)
    return await service.in_turn(work) if large else work()


def _repeated(service: Service, body: ResponsesRequest) -> dict[str, str]:
    defaults = {"temperature": 1.0, "top_p": 1.0} | service.sampling_defaults
    choice = body.tool_choice or "auto"
    format = body.text.format if body.text is not None else None
    effort = body.reasoning.effort if body.reasoning is not None else None
    values = {
        "model": service.named(body.model),
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": effort, "summary": None},
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": defaults["temperature"] if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"} if format is None else format.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
        "tools": [
            {"type": "function", "name": tool.name, "description": tool.description, "parameters": tool.parameters}
            | {"strict": bool(tool.strict)}
            for tool in body.functions
        ],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": defaults["top_p"] if body.top_p is None else body.top_p,
        "truncation": "disabled",
    }
    return {name: json.dumps(value) for name, value in values.items()}
