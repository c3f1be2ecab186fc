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

MAX_CHARACTERS = 8000
"""Longer results and errors of tools are truncated for the model."""


async def answer_calls(chat: Chat, reply: Reply, tools: Sequence[Callable[..., Any]]) -> None:
    """Runs each call of `reply` and adds its result, or its error, as a message with the role `tool`.

    Calls run one after another, in order. A plain function runs in a separate thread, so a timeout of the conversation
    ends the wait for it, though not the function. An exception of a tool is its result, `ValueError: …`, except for
    ConversationOver. A result that is not a string is passed as JSON. `chat.seconds` counts the seconds per tool.
    """
    by_name = {tool_name(tool): tool for tool in tools}
    for call in reply.tool_calls:
        began = time.monotonic()
        tool = by_name.get(call.name)
        problem = call.problem or _call_error(call, by_name)
        content = f"Error: {problem}" if problem or tool is None else await _result(tool, call)
        if tool is not None:
            chat.seconds[call.name] = chat.seconds.get(call.name, 0.0) + time.monotonic() - began
        chat.add(_truncated(content), role="tool", **({"name": call.name} if tool is not None else {}))


def _call_error(call: ToolCall, by_name: dict[str, Callable[..., Any]]) -> str:
    """Why a call is invalid; empty if it is valid."""
    if call.name not in by_name:
        names = f"There are: {', '.join(by_name)}" if by_name else "There are none"
        return f'there is no tool "{call.name[:80]}".{closest(call.name[:80], by_name)} {names}'
    problem = problem_with(call.arguments, schema_of(by_name[call.name])["function"]["parameters"])
    return f"{call.name}: {problem}" if problem else ""


async def _result(tool: Callable[..., Any], call: ToolCall) -> str:
    """The tool's result as text, or its error."""
    try:
        if inspect.iscoroutinefunction(tool):
            return _text(await tool(**call.arguments))
        return await _in_thread(lambda: _text(tool(**call.arguments)))
    except (ConversationOver, asyncio.CancelledError):
        raise
    except BaseException as error:  # including SystemExit, raised by the tool
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


def _truncated(text: str) -> str:
    # A lone surrogate cannot be encoded as UTF-8, which tokenizers need.
    text = text.encode(errors="replace").decode()
    left_out = len(text) - MAX_CHARACTERS
    return text if left_out <= 0 else f"{text[:MAX_CHARACTERS]}\n… {left_out} more characters are left out"


async def _in_thread(function: Callable[[], str]) -> str:
    """The function's result. Its thread is a daemon, unlike asyncio.to_thread's: if it hangs, it blocks neither other
    tools nor the end of the process."""
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
            # A future does not accept StopIteration, and the others would end more than this call.
            is_special = isinstance(error, StopIteration | asyncio.CancelledError | KeyboardInterrupt)
            raised = RuntimeError(type(error).__name__) if is_special else error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(deliver, value, raised)

    threading.Thread(target=run, name="tool", daemon=True).start()
    return await done
