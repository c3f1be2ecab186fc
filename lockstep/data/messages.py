"""Messages of data as chat templates expect them: OpenAI's wire format, and what other formats say beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeGuard

from lockstep.data.chat import ChatTemplate, ChatTemplateError

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning in data. Templates read the first, gpt-oss's the second; transformers gives both."""
SHOWN_REASONING = REASONING[:2]
"""The names under which reasoning is given to templates: each reads one of them."""
FLAGS = ("weight", "train", "training", "trainable", "loss", "loss_mask")
"""Names under which data says whether a message is trained on: OpenAI's is the first."""
OTHER_ANSWERS = ("function_call", "audio", "refusal", "train_detail")
"""What an answer can consist of elsewhere, and no chat template knows: OpenAI's, and axolotl's parts of an answer."""
LAYOUTS = ("conversations", "instruction", "input", "output", "history", "system")
"""Keys of rows in ShareGPT's layout, and in Alpaca's; the last is beside `messages` too."""
SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system", "tool": "tool",
    "observation": "tool",
}  # fmt: skip
"""Of ShareGPT's `from`, the roles that templates know."""


def in_our_layout(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of ShareGPT's (`conversations` of `from` and `value`, also under `messages`) or Alpaca's layout
    (`instruction`, `input`, `output`, and `history`, a list of pairs) with `messages`; any other row as it is.

    A text `system` beside them, or beside `messages`, is the first message. Raises ChatTemplateError for a speaker that
    is not known, and for a `history` or `system` that cannot be one.
    """
    turns = row.get("messages") or row.get("conversations")
    instruction, given, output = (row.get(key) for key in ("instruction", "input", "output"))
    others = (row.get(key) for key in ("messages", "prompt", "completion"))
    if isinstance(turns, list) and turns and all(isinstance(t, dict) and {"from", "value"} <= t.keys() for t in turns):
        messages = [_turn(turn) for turn in turns]
    elif are_messages(turns):
        messages = turns
    elif isinstance(instruction, str) and isinstance(output, str) and not any(others):
        asked = f"{instruction}\n\n{given}" if isinstance(given, str) and given.strip() else instruction
        messages = [message for pair in [*_history(row), (asked, output)] for message in _exchange(*pair)]
    else:
        return dict(row)
    return {**row, **dict.fromkeys(LAYOUTS), "messages": [*system_message(row, messages), *messages]}


def _history(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = row.get("history") or []
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list | tuple) and [type(said) for said in pair] == [str, str] for pair in pairs
    ):
        raise ChatTemplateError('"history" is not a list of pairs of texts')
    return [(asked, said) for asked, said in pairs]


def _exchange(asked: str, said: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]


def system_message(row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The row's `system` as a message, unless the messages begin with it."""
    text = row.get("system")
    if text in (None, "") or (messages and messages[0] == {"role": "system", "content": text}):
        return []
    if not isinstance(text, str):
        raise ChatTemplateError('"system" is not a text')
    if any(message["role"] == "system" for message in messages):
        raise ChatTemplateError('has "system", but also a message of that role; leave one of them out')
    return [{"role": "system", "content": text}]


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


def plain(message: Mapping[str, Any], between: str = "\n") -> dict[str, Any]:
    """A message as templates expect it: parts of texts in one string with `between` between them, arguments of tool
    calls as objects, no flags.

    Raises ChatTemplateError if its content is not text, which a tool's result need not be. The assistant's tool calls
    and reasoning need no content at all.
    """
    # In Parquet every message has the keys of all messages. Transformers leaves out null values too.
    found = {key: value for key, value in message.items() if value is not None and key not in FLAGS}
    content = found.get("content")
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        found["content"] = content = between.join(part["text"] for part in content)
    if isinstance(calls := found.get("tool_calls"), list):
        found["tool_calls"] = [_call(call) for call in calls]
        if not calls:
            del found["tool_calls"]  # templates take it for a call
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
    """A tool call, with `function` or flat, whose arguments are an object: on the wire they are its JSON."""
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        return {**call, "function": _call(call["function"])}
    if not isinstance(call, dict) or not isinstance(call.get("arguments"), str):
        return call
    name = call.get("name")
    try:
        arguments = json.loads(call["arguments"].strip() or "{}")
    except (ValueError, RecursionError) as error:
        raise ChatTemplateError(f"the arguments of a call of {name!r:.60} are not JSON ({error})") from error
    if not isinstance(arguments, dict):
        raise ChatTemplateError(f"the arguments of a call of {name!r:.60} are JSON, but not of an object")
    return {**call, "arguments": arguments}


def between_parts(template: ChatTemplate) -> str:
    """What a template writes between two parts of a message's content: nothing, as a rule; a line break for a template
    that knows no parts."""
    parts = [{"type": "text", "text": text} for text in ("\ue000", "\ue001")]
    try:
        text = template.render([{"role": "user", "content": parts}], add_generation_prompt=False)
    except ChatTemplateError:
        return "\n"
    found = re.search("\ue000(.*)\ue001", text, re.DOTALL)
    return "\n" if found is None or "text" in found[1] else found[1]


def refuse_hidden(
    template: ChatTemplate, messages: Sequence[dict[str, Any]], trained: Sequence[bool], text: str, **values: Any
) -> None:
    """Raises ChatTemplateError if the rendering `text` lacks a message, its tool calls, or all that it consists of. An
    answer may lack what is shown when it is the last message, and its reasoning unless it is trained on.

    Content, tool calls and reasoning are changed to see whether the text changes.
    """

    def shows(index: int, change: dict[str, Any]) -> bool:
        whole, until = text, len(messages)
        if messages[index]["role"] == "assistant":  # of earlier answers a template may drop a part
            with suppress(ChatTemplateError):  # some templates want a user's message
                whole = template.render([*messages[: index + 1]], add_generation_prompt=False, **values)
                until = index + 1
        others = [*messages[:index], {**messages[index], **change}, *messages[index + 1 :]][:until]
        return template.render(others, add_generation_prompt=False, **values) != whole

    seen = _seen(template, messages, **values)
    for index, message in enumerate(messages):
        content, calls = message.get("content"), message.get("tool_calls")
        who = f"the role {message['role']!r:.60}"
        if other := next((key for key in OTHER_ANSWERS if message.get(key)), None):
            raise ChatTemplateError(f"a message of {who} has {other!r}, which chat templates do not show")
        if isinstance(content, str) and content and index not in seen and not shows(index, {"content": f"{content}?"}):
            raise ChatTemplateError(f"the chat template does not show the content of {who}")
        if isinstance(calls, list) and calls and not shows(index, {"tool_calls": [_renamed(call) for call in calls]}):
            raise ChatTemplateError("the chat template does not show tool calls")
        is_all = "content" not in message and not calls
        if (trained[index] or is_all) and (thought := _other_thought(message)) and not shows(index, thought):
            raise ChatTemplateError(f"the chat template does not show the reasoning of {who}")


def _seen(template: ChatTemplate, messages: Sequence[dict[str, Any]], **values: Any) -> set[int]:
    """Which messages' contents the template shows at their ends, found by one rendering with a mark in each."""
    marked = [
        {**message, "content": f"{message['content']}\ue000{index}\ue001"}
        if isinstance(message.get("content"), str)
        else message
        for index, message in enumerate(messages)
    ]
    try:
        text = template.render(marked, add_generation_prompt=False, **values)
    except ChatTemplateError:
        return set()
    return {int(index) for index in re.findall("\ue000([0-9]+)\ue001", text)}


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
