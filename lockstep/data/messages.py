"""Messages of data as chat templates expect them: OpenAI's wire format, and what other formats say beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from lockstep.data.chat import ChatTemplate, ChatTemplateError

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning in data. Templates read the first, gpt-oss's the second; transformers gives both."""
SHOWN_REASONING = REASONING[:2]
"""The names under which reasoning is given to templates: each reads one of them."""
FLAGS = ("weight", "train", "trainable", "loss", "loss_mask")
"""Names under which data says whether a message is trained on: OpenAI's is the first."""
OTHER_ANSWERS = ("function_call", "audio", "refusal")
"""What an answer of OpenAI's can consist of, and no chat template knows."""
LAYOUTS = ("conversations", "instruction", "input", "output")
"""Keys of rows in ShareGPT's layout, and in Alpaca's."""
SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system", "tool": "tool",
    "observation": "tool",
}  # fmt: skip
"""Of ShareGPT's `from`, the roles that templates know."""


def in_our_layout(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of ShareGPT's (`conversations` of `from` and `value`, also under `messages`) or Alpaca's layout
    (`instruction`, `input`, `output`) with `messages`; any other row as it is.

    Raises ChatTemplateError for a speaker that is not known.
    """
    turns = row.get("messages") or row.get("conversations")
    if isinstance(turns, list) and turns and all(isinstance(t, dict) and {"from", "value"} <= t.keys() for t in turns):
        return {**row, "conversations": None, "messages": [_turn(turn) for turn in turns]}
    if row.get("messages") is None and are_messages(turns):
        return {**row, "conversations": None, "messages": turns}
    instruction, given, output = (row.get(key) for key in ("instruction", "input", "output"))
    others = (row.get(key) for key in ("messages", "prompt", "completion"))
    if isinstance(instruction, str) and isinstance(output, str) and not any(others):
        asked = f"{instruction}\n\n{given}" if isinstance(given, str) and given.strip() else instruction
        said = [{"role": "user", "content": asked}, {"role": "assistant", "content": output}]
        return {**row, **dict.fromkeys(LAYOUTS), "messages": said}
    return dict(row)


def _turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    if turn["from"] not in SPEAKERS:
        raise ChatTemplateError(f"a turn is from {turn['from']!r:.60}; only {', '.join(SPEAKERS)} are known")
    others = {key: value for key, value in turn.items() if key not in ("from", "value")}
    return {"role": SPEAKERS[turn["from"]], "content": turn["value"], **others}


def are_messages(value: Any) -> TypeGuard[list[Any]]:
    """Whether it is a list, maybe empty, of objects with a role."""
    return isinstance(value, list) and all(isinstance(m, dict) and "role" in m for m in value)


def is_trained(message: Mapping[str, Any]) -> bool:
    """Whether a message's own flags leave it to be trained on.

    Raises ChatTemplateError for a flag that is neither true nor false, and for another role's message that is to be
    trained on.
    """
    flags = {name: message[name] for name in FLAGS if message.get(name) is not None}
    for name, value in flags.items():
        if isinstance(value, str | list | dict) or value not in (0, 1):
            raise ChatTemplateError(f"{name} of a message is {value!r:.40}; it must be true or false, 1 or 0")
        if value and message["role"] != "assistant":
            raise ChatTemplateError(
                f"a message of the role {message['role']!r:.60} has {name} {value!r}; only the assistant's are learned"
            )
    return all(flags.values())


def plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: parts of texts in one string, arguments of tool calls as objects, no flags.

    Raises ChatTemplateError if its content is not text, which a tool's result need not be. The assistant's tool calls
    and reasoning need no content at all.
    """
    # In Parquet every message has the keys of all messages. Transformers leaves out null values too.
    found = {key: value for key, value in message.items() if value is not None and key not in FLAGS}
    content = found.get("content")
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        found["content"] = content = "\n".join(part["text"] for part in content)
    if isinstance(calls := found.get("tool_calls"), list):
        found["tool_calls"] = [_call(call) for call in calls]
    reasoning = next((found[name] for name in REASONING if name in found), None)
    can_be_other = message["role"] == "tool" if content is not None else found.get("tool_calls")
    if content is None and message["role"] == "assistant" and isinstance(reasoning, str):
        can_be_other = can_be_other or reasoning.strip()
    if not isinstance(content, str) and not can_be_other:
        raise ChatTemplateError(f"a message of the role {message['role']!r:.60} has no text as its content")
    if reasoning is not None:
        found = {"thinking": reasoning, **found, "reasoning_content": reasoning}
    return found


def _call(call: Any) -> Any:
    """A tool call whose arguments are an object: on the wire they are its JSON."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    name = function.get("name")
    try:
        arguments = json.loads(function["arguments"].strip() or "{}")
    except (ValueError, RecursionError) as error:
        raise ChatTemplateError(f"the arguments of a call of {name!r:.60} are not JSON ({error})") from error
    if not isinstance(arguments, dict):
        raise ChatTemplateError(f"the arguments of a call of {name!r:.60} are JSON, but not of an object")
    return {**call, "function": {**function, "arguments": arguments}}


def refuse_hidden(
    template: ChatTemplate, messages: Sequence[dict[str, Any]], trained: Sequence[bool], text: str, **values: Any
) -> None:
    """Raises ChatTemplateError if the rendering `text` lacks a message, its tool calls, or all that it consists of; and
    if the reasoning of an answer that is trained on is not even shown when the answer is the last message.

    Content that does not stand in the text as it is, tool calls and reasoning are changed to see whether the text
    changes.
    """

    def shows(index: int, change: dict[str, Any], last: bool = False) -> bool:
        others = [*messages[:index], {**messages[index], **change}, *messages[index + 1 :]]
        if last:
            try:
                alone = template.render([*messages[: index + 1]], add_generation_prompt=False, **values)
                return template.render(others[: index + 1], add_generation_prompt=False, **values) != alone
            except ChatTemplateError:
                pass  # some templates want a user's message
        return template.render(others, add_generation_prompt=False, **values) != text

    for index, message in enumerate(messages):
        content, calls = message.get("content"), message.get("tool_calls")
        who = f"the role {message['role']!r:.60}"
        if other := next((key for key in OTHER_ANSWERS if message.get(key)), None):
            raise ChatTemplateError(f"a message of {who} has {other!r}, which chat templates do not show")
        if isinstance(content, str) and content.strip() not in text and not shows(index, {"content": f"{content}?"}):
            raise ChatTemplateError(f"the chat template does not show the content of {who}")
        if isinstance(calls, list) and calls and not shows(index, {"tool_calls": [_renamed(call) for call in calls]}):
            raise ChatTemplateError("the chat template does not show tool calls")
        if thought := _other_thought(message):
            alone = "content" not in message and not calls
            if (alone and not shows(index, thought)) or (trained[index] and not shows(index, thought, last=True)):
                raise ChatTemplateError(f"the chat template does not show the reasoning of {who}")


def _other_thought(message: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a message that have its reasoning, with another one; empty without any."""
    changed = {name: f"{message[name]}?" for name in REASONING if message.get(name)}
    content = message.get("content")
    if message["role"] == "assistant" and isinstance(content, str) and "</think>" in content:
        changed["content"] = content.replace("</think>", "?</think>", 1)
    return changed


def _renamed(call: Any) -> Any:
    """Another call: of another function, with other arguments."""
    if not isinstance(call, dict):
        return call
    if isinstance(function := call.get("function"), dict):
        return {**call, "function": _renamed(function)}
    return {**call, "name": f"{call.get('name')}_", "arguments": {"other": "arguments"}}
