"""Anthropic's Messages API: its messages as those of a chat, its tools and output format as the plan of a reply."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lockstep.generate.server.access_log import record_of
from lockstep.generate.server.answer import answer
from lockstep.generate.server.anthropic_bodies import (
    Block,
    CountTokensRequest,
    MessagesRequest,
    OutputConfig,
    TextBlock,
)
from lockstep.generate.server.anthropic_reply import MessageReply
from lockstep.generate.server.api_error import ApiError, json_response
from lockstep.generate.server.call_rules import Tool
from lockstep.generate.server.chats import chat_prompt, require_template
from lockstep.generate.server.history import require_results
from lockstep.generate.server.protocol import Message, TextPart
from lockstep.generate.server.reasoning import effort_values, thinking_values
from lockstep.generate.server.reply_grammar import ContentRule
from lockstep.generate.server.service import Service
from lockstep.generate.server.tool_bodies import CallBody, CalledFunction, check_names, check_tool
from lockstep.generate.server.tools import ReplyPlan, ToolChoice, plan_reply

LONGEST_NAME = 128
"""Characters of a tool's name."""
MOST_CALLS = 1024
"""In one turn of the assistant."""
MANY_BLOCKS = 256
"""Messages and blocks; longer conversations are converted one at a time."""
DEFAULT_EFFORT = "high"


async def create_message(service: Service, request: Request, body: MessagesRequest) -> Response:
    """POST /v1/messages."""
    sampling = body.sampling()
    sampling.check_fields()
    prompt, plan = await _prompt(service, body)
    # Clients must send a limit without knowing the context, so one beyond it is no error in this API.
    max_tokens = min(body.max_tokens, max(1, service.context - len(prompt)))
    writer = MessageReply(
        id=f"msg_{secrets.token_hex(12)}",
        model=service.named(body.model),
        request_id=record_of(request).request_id,
        prompt_tokens=len(prompt),
        fills_context=max_tokens < body.max_tokens,
    )
    return await answer(service, request, sampling, [prompt], max_tokens, None, plan, chat=True, writer=writer)


async def count_tokens(service: Service, request: Request, body: CountTokensRequest) -> Response:
    """POST /v1/messages/count_tokens."""
    prompt, _ = await _prompt(service, body)
    return json_response({"input_tokens": len(prompt)})


async def _prompt(service: Service, body: CountTokensRequest) -> tuple[list[int], ReplyPlan]:
    require_template(service)
    work = partial(_checked, body)
    messages = work() if _count(body) < MANY_BLOCKS else await service.in_turn(work)
    plan = _plan(service, body)
    return await chat_prompt(service, messages, _template_values(service, body), plan), plan


def _count(body: CountTokensRequest) -> int:
    contents = [body.system, *(turn.content for turn in body.messages)]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    results = [block.content for block in blocks if isinstance(block, Block)]
    return len(contents) + len(blocks) + sum(len(result) for result in results if isinstance(result, list))


def _checked(body: CountTokensRequest) -> list[Message]:
    messages = conversation(body)
    require_results(messages, "messages")
    return messages


def conversation(body: CountTokensRequest) -> list[Message]:
    """The messages of a chat. Successive messages of a role are one; a tool's result is a message of its own."""
    placed = [("system", "system", block) for block in _blocks(body.system)] if body.system else []
    for number, turn in enumerate(body.messages):
        place = f"messages.{number}.content"
        placed += ((turn.role, f"{place}.{n}", block) for n, block in enumerate(_blocks(turn.content)))
    messages: list[Message] = []
    names: dict[str, str] = {}
    for role, group in groupby(placed, key=lambda each: each[0]):
        blocks = [(where, block) for _, where, block in group]
        if role == "system":
            messages.append(_message("system", _text(block for _, block in blocks)))
        elif role == "assistant":
            messages.append(_of_assistant(blocks, names))
        else:
            messages += _of_user(blocks, names)
    return messages


def _blocks(content: str | list[TextBlock] | list[Block]) -> list[Any]:
    if isinstance(content, str) or not content:
        return [TextBlock(type="text", text=content if isinstance(content, str) else "")]
    return content


def _text(blocks: Iterable[TextBlock]) -> str | list[TextPart]:
    parts = [TextPart(type="text", text=block.text or "") for block in blocks]
    return parts[0].text if len(parts) == 1 else parts


def _message(role: str, content: str | list[TextPart] | None, **fields: Any) -> Message:
    return Message.model_validate({"role": role, "content": content, **fields})


def _of_assistant(blocks: list[tuple[str, Block]], names: dict[str, str]) -> Message:
    """names: of the tools called so far, by the calls' ids; extended. A redacted block has nothing that can be read."""
    by_type: dict[str, list[Block]] = {}
    for _, block in blocks:
        by_type.setdefault(block.type, []).append(block)
    calls = by_type.get("tool_use", [])
    if len(calls) > MOST_CALLS:
        raise ApiError(400, f"{blocks[0][0]}: {len(calls)} calls in one turn, more than {MOST_CALLS}", "messages")
    names |= {call.id or "": call.name or "" for call in calls}
    called = [(call.id, CalledFunction(name=call.name or "", arguments=call.input or {})) for call in calls]
    return _message(
        "assistant",
        _text(by_type["text"]) if "text" in by_type else None if calls else "",
        reasoning_content="\n".join(block.thinking or "" for block in by_type.get("thinking", [])) or None,
        tool_calls=[CallBody(id=call_id, function=function) for call_id, function in called] or None,
    )


def _of_user(blocks: list[tuple[str, Block]], names: dict[str, str]) -> Iterator[Message]:
    for is_result, group in groupby(blocks, key=lambda placed: placed[1].type == "tool_result"):
        if not is_result:
            yield _message("user", _text(block for _, block in group))
            continue
        for _, block in group:
            results = _blocks(block.content or "")
            if block.is_error:
                # Templates have no other way to say so.
                results = [TextBlock(type="text", text=f"Error: {results[0].text}"), *results[1:]]
            name = names.get(block.tool_use_id or "")
            yield _message("tool", _text(results), tool_call_id=block.tool_use_id, name=name)


def _plan(service: Service, body: CountTokensRequest) -> ReplyPlan:
    tools = []
    for number, each in enumerate(body.tools or ()):
        tool = Tool(each.name, each.description or "", each.input_schema, bool(each.strict))
        check_tool(tool, f"tools.{number}", "input_schema", LONGEST_NAME)
        tools.append(tool)
    check_names(tools, "tools")
    asked, format = body.tool_choice, (body.output_config or OutputConfig()).format
    choice: ToolChoice = "auto"
    if asked is not None and asked.name is not None:
        choice = (asked.name,)
    elif asked is not None:
        choice = {"any": "required", "none": "none"}.get(asked.type, "auto")  # type: ignore[assignment]
    parallel = asked is None or not asked.disable_parallel_tool_use
    content = ContentRule("json", format.schema_) if format else None
    return replace(plan_reply(service, tools, choice, parallel, content, "output_config"), call_prefix="toolu_")


def _template_values(service: Service, body: CountTokensRequest) -> dict[str, Any]:
    """The values with which the chat template follows `thinking` and `effort`. Raises ApiError where it cannot."""
    asked = body.thinking.type if body.thinking is not None else "adaptive"
    values = {} if asked == "adaptive" else thinking_values(service, asked == "enabled")
    effort = (body.output_config or OutputConfig()).effort
    return values | effort_values(service, effort, "output_config.effort", DEFAULT_EFFORT)
