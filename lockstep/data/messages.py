"""Converts messages of training data, in OpenAI's and other formats, to what chat templates expect."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeGuard

from lockstep.data.chat import ChatTemplate, ChatTemplateError

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message's reasoning in data. Templates read the first, gpt-oss's the second; transformers passes both."""
SHOWN_REASONING = REASONING[:2]
"""Keys under which reasoning is passed to templates: each template reads one of them."""
FLAGS = ("weight", "train", "training", "trainable", "loss", "loss_mask")
"""Keys of the flag that says whether a message is trained on; the first is OpenAI's."""
OTHER_ANSWERS = ("function_call", "audio", "refusal", "train_detail")
"""Parts of an answer in OpenAI's and axolotl's formats that no chat template renders."""
LAYOUTS = ("conversations", "instruction", "input", "output", "history", "system")
"""Keys of rows in ShareGPT's and Alpaca's layouts; the last may also accompany `messages`."""
SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system", "tool": "tool",
    "observation": "tool",
}  # fmt: skip
"""The role for each value of ShareGPT's `from`."""


def in_our_layout(row: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a row of ShareGPT's layout (`conversations` of `from` and `value`, also under `messages`) or Alpaca's
    (`instruction`, `input`, `output`, and `history`, a list of pairs) to `messages`; returns any other row unchanged.

    A text `system` in the row becomes the first message. Raises ChatTemplateError for an unknown speaker and for an
    invalid `history` or `system`.
    """
    turns = row.get("messages") or row.get("conversations")
    instruction, context, output = (row.get(key) for key in ("instruction", "input", "output"))
    others = (row.get(key) for key in ("messages", "prompt", "completion"))
    if isinstance(turns, list) and turns and all(isinstance(t, dict) and {"from", "value"} <= t.keys() for t in turns):
        messages = [_turn(turn) for turn in turns]
    elif are_messages(turns):
        messages = turns
    elif isinstance(instruction, str) and isinstance(output, str) and not any(others):
        question = f"{instruction}\n\n{context}" if isinstance(context, str) and context.strip() else instruction
        messages = [message for pair in [*_history(row), (question, output)] for message in _exchange(*pair)]
    else:
        return dict(row)
    return {**row, **dict.fromkeys(LAYOUTS), "messages": [*system_message(row, messages), *messages]}


def _history(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = row.get("history") or []
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list | tuple) and [type(text) for text in pair] == [str, str] for pair in pairs
    ):
        raise ChatTemplateError('"history" is not a list of pairs of texts')
    return [(question, answer) for question, answer in pairs]


def _exchange(question: str, answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def system_message(row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The row's `system` as a message, unless the messages already begin with it."""
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
    """Whether it is a possibly empty list of objects with a role."""
    return isinstance(value, list) and all(isinstance(m, dict) and "role" in m for m in value)


def is_trained(message: Mapping[str, Any]) -> bool:
    """Whether a message's flags allow training on it.

    Raises ChatTemplateError for a flag that is neither true nor false, and for a true flag of another role's message.
    """
    flags = {name: message[name] for name in FLAGS if message.get(name) is not None}
    for name, value in flags.items():
        if isinstance(value, str | list | dict) or value not in (0, 1):
            raise ChatTemplateError(f"{name} of a message is {value!r:.40}; it must be true or false, 1 or 0")
        if value and message["role"] != "assistant":
            raise ChatTemplateError(
                f"a message of the role {message['role']!r:.60} has {name} {value!r}; "
                "only the assistant's can be trained on"
            )
    return all(flags.values())


def plain(message: Mapping[str, Any], between: str = "\n") -> dict[str, Any]:
    """A message as templates expect it: text parts joined by `between`, arguments of tool calls as objects, no flags.

    Raises ChatTemplateError if its content is not text, except for a tool's result. The assistant's tool calls and
    reasoning need no content.
    """
    # In Parquet every message has the keys of all messages. Transformers also drops null values.
    values = {key: value for key, value in message.items() if value is not None and key not in FLAGS}
    content = values.get("content")
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        values["content"] = content = between.join(part["text"] for part in content)
    if isinstance(calls := values.get("tool_calls"), list):
        values["tool_calls"] = [change_call(call, decoded_call) for call in calls]
        if not calls:
            del values["tool_calls"]  # templates treat an empty list as a call
    reasoning = next((values[name] for name in REASONING if name in values), None)
    needs_no_text = message["role"] == "tool" if content is not None else values.get("tool_calls")
    if content is None and message["role"] == "assistant" and isinstance(reasoning, str):
        needs_no_text = needs_no_text or reasoning.strip()
    if not isinstance(content, str) and not needs_no_text:
        raise ChatTemplateError(f"a message of the role {message['role']!r:.60} has no text as its content")
    if reasoning is not None:
        values = {"thinking": reasoning, **values, "reasoning_content": reasoning}
    return values


def change_call(call: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A tool call, flat or with `function`, with its name and arguments changed; anything else unchanged."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": change_call(call["function"], change)}
    return change(call)


def decoded_call(call: dict[str, Any]) -> dict[str, Any]:
    """A call whose arguments are decoded from JSON to an object."""
    if not isinstance(call.get("arguments"), str):
        return call
    name = call.get("name")
    try:
        arguments = json.loads(call["arguments"].strip() or "{}")
    except (ValueError, RecursionError) as error:
        raise ChatTemplateError(f"the arguments of a call of {name!r:.60} are not JSON ({error})") from error
    if not isinstance(arguments, dict):
        raise ChatTemplateError(f"the arguments of a call of {name!r:.60} are JSON, but not of an object")
    return {**call, "arguments": arguments}


def _other_call(call: dict[str, Any]) -> dict[str, Any]:
    return {**call, "name": f"{call.get('name')}_", "arguments": {"other": "arguments"}}


@dataclass(frozen=True)
class CallLayout:
    """What a template expects of a message with tool calls."""

    arguments: Literal["object", "text"]
    """Text: JSON."""
    no_content: Literal["", None]
    """The content of a message that has only calls."""
    parallel: bool = True
    """Whether it shows all calls of a message; some show the first alone, or refuse several."""

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message whose calls are in OpenAI's format, as the template expects it. Raises ChatTemplateError for
        arguments that are not JSON of an object."""
        calls = [change_call(call, self._call) for call in message["tool_calls"]]
        return {**message, "content": message.get("content") or self.no_content, "tool_calls": calls}

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        call = decoded_call(call)
        if self.arguments == "object" or isinstance(call.get("arguments"), str):
            return call
        return {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}


def call_layout(template: ChatTemplate) -> CallLayout | None:
    """What the template expects of a message with tool calls; None if it shows none. Found out by rendering some."""
    layouts = [CallLayout(arguments, content) for arguments in ("object", "text") for content in (None, "")]  # type: ignore[arg-type]
    layout = next((layout for layout in layouts if _shows_calls(template, layout, 1)), None)
    return layout and replace(layout, parallel=_shows_calls(template, layout, 2))


def _shows_calls(template: ChatTemplate, layout: CallLayout, count: int) -> bool:
    function = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
    marks = [(f"\ue001{number}", f"\ue000{number}") for number in range(count)]
    calls = [
        {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": f'{{"a": "{value}"}}'}}
        for number, (name, value) in enumerate(marks)
    ]
    messages = [{"role": "user", "content": "?"}, layout.message({"role": "assistant", "tool_calls": calls})]
    try:
        tools = [{"type": "function", "function": function}]
        text = template.render(messages, add_generation_prompt=False, tools=tools)
    except ChatTemplateError:
        return False
    # Some write what is missing as "None", and objects as Python does.
    return all(mark in text for pair in marks for mark in pair) and "None" not in text and "{'a'" not in text


def between_parts(template: ChatTemplate) -> str:
    """What a template renders between two parts of a message's content: usually nothing; a line break if the template
    does not support parts."""
    parts = [{"type": "text", "text": text} for text in ("\ue000", "\ue001")]
    try:
        text = template.render([{"role": "user", "content": parts}], add_generation_prompt=False)
    except ChatTemplateError:
        return "\n"
    match = re.search("\ue000(.*)\ue001", text, re.DOTALL)
    return "\n" if match is None or "text" in match[1] else match[1]


def shows_developer(template: ChatTemplate) -> bool:
    """Whether a template shows messages of the role developer; most only know it as system, and skip or refuse it."""
    try:
        return "\ue000" in template.render(
            [{"role": "developer", "content": "\ue000"}, {"role": "user", "content": "?"}]
        )
    except ChatTemplateError:
        return False


def refuse_hidden(
    template: ChatTemplate, messages: Sequence[dict[str, Any]], trained: Sequence[bool], text: str, **values: Any
) -> None:
    """Raises ChatTemplateError if the rendering `text` lacks a message's content, tool calls, or only part.

    An answer may lack what the template renders when it is the last message, and its reasoning unless it is trained on.

    Detected by changing content, tool calls and reasoning, and comparing the renderings.
    """

    def shows(index: int, change: dict[str, Any]) -> bool:
        whole, until = text, len(messages)
        if messages[index]["role"] == "assistant":  # templates may drop parts of earlier answers
            with suppress(ChatTemplateError):  # some templates require a user message
                whole = template.render([*messages[: index + 1]], add_generation_prompt=False, **values)
                until = index + 1
        others = [*messages[:index], {**messages[index], **change}, *messages[index + 1 :]][:until]
        return template.render(others, add_generation_prompt=False, **values) != whole

    shown = _shown_contents(template, messages, **values)
    for index, message in enumerate(messages):
        content, calls = message.get("content"), message.get("tool_calls")
        who = f"the role {message['role']!r:.60}"
        if other := next((key for key in OTHER_ANSWERS if message.get(key)), None):
            raise ChatTemplateError(f"a message of {who} has {other!r}, which chat templates do not show")
        if isinstance(content, str) and content and index not in shown and not shows(index, {"content": f"{content}?"}):
            raise ChatTemplateError(f"the chat template does not show the content of {who}")
        if (
            isinstance(calls, list)
            and calls
            and not shows(index, {"tool_calls": [change_call(call, _other_call) for call in calls]})
        ):
            raise ChatTemplateError("the chat template does not show tool calls")
        is_only_part = "content" not in message and not calls
        if (trained[index] or is_only_part) and (changed := _other_reasoning(message)) and not shows(index, changed):
            raise ChatTemplateError(f"the chat template does not show the reasoning of {who}")


def _shown_contents(template: ChatTemplate, messages: Sequence[dict[str, Any]], **values: Any) -> set[int]:
    """Indices of the messages whose contents the template shows to their ends, by one rendering with a mark in each."""
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


def _other_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a message that have its reasoning, with different reasoning; empty without any."""
    changed = {name: f"{message[name]}?" for name in REASONING if message.get(name)}
    content = message.get("content")
    if message["role"] == "assistant" and isinstance(content, str) and "</think>" in content:
        changed["content"] = content.replace("</think>", "?</think>", 1)
    return changed
