"""Lark rules of tool calls in each family's format, with arguments that fit the tools' JSON schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.data.replies import ToolFormat
from lockstep.data.replies.tagged_calls import chain
from lockstep.errors import UserError
from lockstep.generate.grammars import SPACES, regex_rule
from lockstep.generate.server.argument_forms import argument_forms
from lockstep.generate.server.schema_check import is_annotation

OF_ARGUMENTS = ("$defs", "$ref", "additionalProperties", "definitions", "properties", "required", "type")
"""Keywords of a whole set of arguments that are enforced where each is written by itself. No other keys are written."""


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

    def until(self, end: str, rule: str = "", text: str = "TEXT") -> str:
        """Text, and the mark or text that ends it, which cannot be within it. text: the rule of the text."""
        if end in self.vocabulary:
            return f"{text} {self.mark(end)}"
        name = rule or f"until_{len(self.rules)}"
        return self.add(f"{name}[suffix={quoted(end)}]", text).partition("[")[0]

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
    if not enforced:
        return _any_argument(rules, format, number)
    properties, required = _properties(tool)
    parts = []
    for position, (key, schema) in enumerate(properties.items()):
        if not key.strip() or key != key.strip() or any(character in key for character in "<>\n"):
            problem = "contains <, > or a line break, or begins or ends with a space"
            raise UserError(f"the name of an argument {problem}: {key[:60]!r}")
        argument = _argument(rules, format, f"value_{number}_{position}", key, schema, tool)
        parts.append(f"({argument}){'' if key in required else '?'}")
    return " ".join(parts)


def _properties(tool: Tool) -> tuple[Mapping[str, Any], list[str]]:
    """The schemas of a tool's arguments, and the names of the required ones."""
    schemas = chain(tool.schema)
    schema = schemas[-1]
    others = [key for part in schemas for key in part if key not in OF_ARGUMENTS and not is_annotation(key)]
    others += [key for part in schemas[:-1] for key in ("properties", "required") if key in part]
    if others:
        raise UserError(f"{others[0][:80]} of a whole set of arguments is not enforced in this model's format")
    if "$ref" in schema:
        raise UserError(f"the schema refers to {schema['$ref']!r:.80}, which it does not have")
    if any("object" not in _listed(part.get("type", "object")) for part in schemas):
        raise UserError("the type of a whole set of arguments must be object")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise UserError("properties must be an object, and required a list")
    written = {key: value for key, value in properties.items() if value is not False}
    if not all(isinstance(key, str) and key in written for key in required):
        raise UserError("every required argument must be one of its properties")
    return written, required


def _listed(types: Any) -> list[Any]:
    return types if isinstance(types, list) else [types]


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
        value = _value(rules, rule, key, schema, tool, "</arg_value>", "<arg_key>")
        return rf'{begin} "\n" {rules.mark("<arg_value>")} {value} "\n"'
    begin = f"<parameter={key}>\n"
    return f"{quoted(begin)} {_value(rules, rule, key, schema, tool, PARAMETER_END, '<parameter=')}"


def _value(rules: Rules, rule: str, key: str, schema: Any, tool: Tool, end: str, begin: str) -> str:
    """An argument's value, and the end of its tag, which the beginning of another may follow."""
    try:
        forms = argument_forms(tool.schema, key, schema)
    except UserError as error:
        raise UserError(f"the argument {key[:60]!r}: {error}") from error
    ways = [quoted(text) for text in forms.literals]
    ways += [rules.add(f"{rule}_json_{number}", json_rule(each)) for number, each in enumerate(forms.schemas)]
    written = [f"({' | '.join(ways)}) {rules.mark(end)}"] if ways else []
    # Where a reader would see the end of the value.
    within = rf"(?s:.*){end.strip()}[\s\x1c-\x1f]*{begin}(?s:.*)"
    for number, patterns in enumerate(forms.texts):
        all_of = [*map(regex_rule, patterns or ["(?s:.*)"]), f"~{regex_rule(within)}"]
        text = rules.add(f"TEXT_{rule}_{number}".upper(), " & ".join(all_of))
        written.append(rules.until(end, f"{rule}_{number}", text))
    return f"({' | '.join(written)})"
