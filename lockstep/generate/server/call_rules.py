"""Lark rules of tool calls in each family's format, with arguments that fit the tools' JSON schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.data.replies import ToolFormat
from lockstep.data.replies.tagged_calls import referred, types_of
from lockstep.errors import UserError
from lockstep.generate.grammars import SPACES

TEXT_KEYWORDS = ("pattern", "format")
"""Keywords of strings that cannot be enforced where a string is written without quotes."""


@dataclass(frozen=True)
class Tool:
    """A function that a model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    """The JSON schema of its arguments, an object's; None: no arguments are described."""
    strict: bool = False

    def described(self) -> dict[str, Any]:
        """As chat templates expect it."""
        function = {"name": self.name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": function}

    @property
    def schema(self) -> Mapping[str, Any]:
        return {"type": "object", "properties": {}} if self.parameters is None else self.parameters


class Rules:
    """Lark rules, by name, and what they are made of."""

    def __init__(self, vocabulary: Mapping[str, int]):
        self.vocabulary = vocabulary
        self.rules: dict[str, str] = {"TEXT": r"/(.|\n)*/"}

    def add(self, name: str, rule: str) -> str:
        self.rules[name] = rule
        return name

    def mark(self, name: str) -> str:
        """A structural token, or its text if the vocabulary has no such token."""
        return f"<[{self.vocabulary[name]}]>" if name in self.vocabulary else quoted(name)

    def until(self, end: str, rule: str = "", limits: str = "*") -> str:
        """Text, and the mark or text that ends it, which cannot be within it."""
        if end in self.vocabulary:
            return rf"/(.|\n){limits}/ {self.mark(end)}"
        name = rule or f"until_{len(self.rules)}"
        return self.add(f"{name}[suffix={quoted(end)}]", rf"/(.|\n){limits}/").partition("[")[0]

    def lark(self) -> str:
        return "\n".join(f"{name}: {rule}" for name, rule in self.rules.items())


def quoted(text: str) -> str:
    """A literal."""
    return json.dumps(text)


def json_rule(schema: Mapping[str, Any]) -> str:
    """JSON that fits the schema."""
    return f"%json {json.dumps(dict(schema) | SPACES)}"


def call_rules(rules: Rules, format: ToolFormat, tools: Sequence[tuple[Tool, bool]], many: bool) -> str:
    """The rule of one call, or of one or more, except for gpt-oss, whose channels are no part of the calls.

    tools: those that may be called, and whether the arguments must fit their schemas.
    """
    each = [rules.add(f"call_{number}", _call(rules, format, number, *tool)) for number, tool in enumerate(tools)]
    one = rules.add("call", " | ".join(each))
    more, before, after = "", "", ""
    match format.family:
        case "llama3":
            many = False
        case "deepseek":
            before, after = rules.mark(format.marks[0]), rules.mark(format.marks[4])
            more = quoted("\n") if format.variant else ""
        case "mistral" if format.variant:
            before, more, after = f'{rules.mark(format.marks[0])} / ?/ "["', quoted(", "), quoted("]")
        case "qwen3" | "qwen3_xml" | "glm":
            more = quoted("\n")
    return rules.add("calls", f"{before} {one} {f'({more} {one})*' if many else ''} {after}")


def _call(rules: Rules, format: ToolFormat, number: int, tool: Tool, enforced: bool) -> str:
    opening, closing = (rules.mark(format.marks[0]), rules.mark(format.closes)) if format.closes else ("", "")
    if format.family in ("qwen3_xml", "glm"):
        arguments = _tagged(rules, format, number, tool, enforced)
        begin = f"\n<function={tool.name}>\n" if format.family == "qwen3_xml" else f"{tool.name}\n"
        end = quoted("</function>\n") if format.family == "qwen3_xml" else ""
        return f"{opening} {quoted(begin)} {arguments} {end} {closing}"
    arguments = json_rule(tool.schema if enforced else {"type": "object"})
    begin = f'{{"name": {json.dumps(tool.name)}, "{format.arguments}": '
    whole = f'{quoted(begin)} {arguments} "}}"'
    match format.family:
        case "qwen3":
            return f'{opening} "\\n" {whole} "\\n" {closing}'
        case "deepseek":
            opening, separator = rules.mark(format.marks[1]), rules.mark(format.marks[2])
            if format.variant:
                begin = f"{tool.name}\n```json\n"
                return f'{opening} "function" {separator} {quoted(begin)} {arguments} "\\n```" {closing}'
            return f"{opening} {quoted(tool.name)} {separator} {arguments} {closing}"
        case "mistral" if not format.variant:
            return f"{rules.mark(format.marks[0])} {quoted(tool.name)} {rules.mark(format.marks[1])} {arguments}"
    return whole


def _tagged(rules: Rules, format: ToolFormat, number: int, tool: Tool, enforced: bool) -> str:
    """Arguments as tags around keys and values."""
    schema = _resolved(tool.schema)
    properties = schema.get("properties", {}) if enforced else {}
    required = schema.get("required", [])
    if enforced and (not isinstance(properties, Mapping) or not set(required) <= set(properties)):
        raise UserError(f"{tool.name}: every required argument must be one of its properties")
    if enforced and (unknown := next((key for key in ("anyOf", "oneOf", "allOf", "not") if key in schema), None)):
        raise UserError(f"{tool.name}: {unknown} of a whole set of arguments is not enforced in this model's format")
    if not enforced:
        return _any_argument(rules, format, number)
    parts = []
    for position, (key, value) in enumerate(properties.items()):
        if any(character in key for character in "<>\n"):
            raise UserError(f"{tool.name}: the name of an argument contains <, > or a line break: {key[:60]!r}")
        argument = _argument(rules, format, f"value_{number}_{position}", key, value, tool)
        parts.append(f"({argument}){'' if key in required else '?'}")
    return " ".join(parts)


def _any_argument(rules: Rules, format: ToolFormat, number: int) -> str:
    if format.family == "glm":
        key = rf"{rules.mark('<arg_key>')} /[^<>\n]+/ {rules.mark('</arg_key>')}"
        value = f"{rules.mark('<arg_value>')} {rules.until('</arg_value>', f'any_{number}')}"
        return rf'({key} "\n" {value} "\n")*'
    value = rules.until(PARAMETER_END, f"any_{number}")
    return rf'("<parameter=" /[^<>\n]+/ ">\n" {value})*'


PARAMETER_END = "\n</parameter>\n"


def _argument(rules: Rules, format: ToolFormat, rule: str, key: str, schema: Any, tool: Tool) -> str:
    if format.family == "glm":
        begin = f"{rules.mark('<arg_key>')} {quoted(key)} {rules.mark('</arg_key>')}"
        value = _value(rules, rule, schema, tool, "</arg_value>")
        return rf'{begin} "\n" {rules.mark("<arg_value>")} {value} "\n"'
    begin = f"<parameter={key}>\n"
    return f"{quoted(begin)} {_value(rules, rule, schema, tool, PARAMETER_END)}"


def _value(rules: Rules, rule: str, schema: Any, tool: Tool, end: str) -> str:
    """An argument's value, and the end of its tag."""
    root = tool.schema
    schema = _resolved(schema, root) if isinstance(schema, Mapping) else {}
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    closing = rules.mark(end)
    if isinstance(choices, list) and choices:
        written = [value if isinstance(value, str) else json.dumps(value) for value in choices]
        return f"({' | '.join(map(quoted, written))}) {closing}"
    types = types_of(schema, root)
    if types and "string" not in types:
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return f"{json_rule({**schema, **definitions})} {closing}"
    if unenforced := next((key for key in TEXT_KEYWORDS if key in schema), None):
        raise UserError(f"{tool.name}: {unenforced} of a string is not enforced in this model's format of calls")
    limits = "*"
    if {"minLength", "maxLength"} & schema.keys():
        limits = f"{{{int(schema.get('minLength', 0))},{schema.get('maxLength', '')}}}"
    return rules.until(end, rule, limits)


def _resolved(schema: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    for _ in range(16):
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            break
        target = referred(reference, schema if root is None else root)
        if not isinstance(target, Mapping):
            raise UserError(f"the schema refers to {reference[:80]!r}, which it does not have")
        schema = target
    return schema
