"""Tools that a model can call: runs its calls and answers them."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from lockstep.errors import closest
from lockstep.rl.conversations.chat import Chat, ConversationOver, Reply
from lockstep.rl.conversations.schemas import problem_with, schema_of, tool_name
from lockstep.tool_call import ToolCall

__all__ = ["answer_calls", "schema_of"]

LONGEST_RESULT = 8000
"""Characters of a tool's result, or of what was wrong, that the model sees; the rest is cut off."""


async def answer_calls(chat: Chat, reply: Reply, tools: Sequence[Callable[..., Any]]) -> None:
    """Runs each call of `reply` and adds its result, or what was wrong with it, as a message with the role `tool`.

    Calls run one after another, in order. A plain function runs in its own thread, so a timeout of the conversation
    ends the wait for it, though not the function. What a tool raises is its result, `ValueError: …`, except for
    ConversationOver. A result that is not a string is passed as JSON. `chat.seconds` counts the seconds by tool.
    """
    by_name = {tool_name(tool): tool for tool in tools}
    for call in reply.tool_calls:
        began = time.monotonic()
        tool = by_name.get(call.name)
        problem = call.problem or _refusal(call, by_name)
        content = f"Error: {problem}" if problem or tool is None else await _result(tool, call)
        if tool is not None:
            chat.seconds[call.name] = chat.seconds.get(call.name, 0.0) + time.monotonic() - began
        chat.add(_cut(content), role="tool", **({"name": call.name} if tool is not None else {}))


def _refusal(call: ToolCall, by_name: dict[str, Callable[..., Any]]) -> str:
    """Why a call is not run; empty if it is."""
    if call.name not in by_name:
        there = f"There are: {', '.join(by_name)}" if by_name else "There are none"
        return f'there is no tool "{call.name[:80]}".{closest(call.name[:80], by_name)} {there}'
    problem = problem_with(call.arguments, schema_of(by_name[call.name])["function"]["parameters"])
    return f"{call.name}: {problem}" if problem else ""


async def _result(tool: Callable[..., Any], call: ToolCall) -> str:
    """What the tool returns as text, or what it raises."""
    try:
        if inspect.iscoroutinefunction(tool):
            return _text(await tool(**call.arguments))
        return await _in_thread(lambda: _text(tool(**call.arguments)))
    except (ConversationOver, asyncio.CancelledError):
        raise
    except BaseException as error:  # including SystemExit, which is the tool's
        try:
            return f"Error: {type(error).__name__}: {error}"
        except Exception:
            return f"Error: {type(error).__name__}"


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)


def _cut(text: str) -> str:
    # A lone surrogate cannot be encoded as UTF-8, which tokenizers need.
    text = text.encode(errors="replace").decode()
    left_out = len(text) - LONGEST_RESULT
    return text if left_out <= 0 else f"{text[:LONGEST_RESULT]}\n… {left_out} more characters are left out"


async def _in_thread(function: Callable[[], str]) -> str:
    """The function's value. Its thread is a daemon, unlike those of asyncio.to_thread: one that hangs blocks neither
    other tools nor the end of the process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[str] = loop.create_future()

    def deliver(value: str, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(value)
        else:
            done.set_exception(error)

    def run() -> None:
        value, raised = "", None
        try:
            value = function()
        except BaseException as error:
            # A future does not accept StopIteration, and the others would end more than the call.
            foreign = isinstance(error, StopIteration | asyncio.CancelledError | KeyboardInterrupt)
            raised = RuntimeError(type(error).__name__) if foreign else error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(deliver, value, raised)

    threading.Thread(target=run, name="tool", daemon=True).start()
    return await done
