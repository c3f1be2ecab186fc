"""Parts of request bodies: tools, which of them to call, calls in the history, and what the content must be."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from lockstep.generate.server.api_error import ApiError
from lockstep.generate.server.call_rules import Tool
from lockstep.generate.server.reply_grammar import ContentRule

MOST_TOOLS = 1024
NAME = re.compile(r"[a-zA-Z0-9_-]+")
LONGEST_NAME = 64
MOST_CHOICES = 4096
PATTERN = Annotated[str, Field(min_length=1, max_length=2**12)]


class Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class ToolFunction(Part):
    """What a tool does."""

    name: str = Field(description="a string")
    description: str | None = Field(None, description="a string")
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema of an object")
    strict: bool | None = Field(None, description="true or false")


class ToolBody(Part):
    """A tool."""

    type: Literal["function"] = Field(description="function: other kinds of tools are not supported here")
    function: ToolFunction = Field(description="an object with name, description and parameters")


class NamedFunction(Part):
    name: str = Field(description="the name of a tool")


class NamedChoice(Part):
    type: Literal["function"]
    function: NamedFunction


Choice = Literal["none", "auto", "required"] | NamedChoice
CHOICE = 'none, auto, required, or {"type": "function", "function": {"name": …}}'


class CalledFunction(Part):
    name: str = Field(description="the name of a tool")
    arguments: str | dict[str, Any] = Field(description="a string with the JSON of an object")


class CallBody(Part):
    """A call in the history."""

    id: str | None = None
    type: Literal["function"] = Field(
        default="function", description="function: other kinds of calls are not supported here"
    )
    function: CalledFunction = Field(description="an object with name and arguments")

    def plain(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return ({"id": self.id} if self.id is not None else {}) | {"type": "function", "function": function}


class SchemaBody(Part):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="a JSON schema, an object")
    strict: bool | None = None


class ResponseFormat(Part):
    """What the content must be, in OpenAI's form."""

    type: Literal["text", "json_object", "json_schema"] = Field(description="text, json_object or json_schema")
    json_schema: SchemaBody | None = Field(None, description="an object with name and schema")


class StructuredOutputs(Part):
    """What the content must be, in vLLM's form."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="a JSON schema, an object or its JSON")
    regex: PATTERN | None = Field(None, description="a regular expression of up to 4096 characters")
    choice: list[PATTERN] | None = Field(
        None, min_length=1, max_length=MOST_CHOICES, description=f"1 to {MOST_CHOICES} strings of up to 4096 characters"
    )
    grammar: str | None = Field(
        None, min_length=1, max_length=2**14, description="a grammar in Lark's syntax, of up to 16384 characters"
    )
    json_object: bool | None = Field(None, description="true or false")


def tools_of(bodies: Sequence[ToolBody], field: str = "tools") -> tuple[Tool, ...]:
    """Raises ApiError as `check_tool` and `check_names`."""
    tools = []
    for number, body in enumerate(bodies):
        function = body.function
        tool = Tool(function.name, function.description or "", function.parameters, bool(function.strict))
        check_tool(tool, f"{field}.{number}.function", "parameters", LONGEST_NAME)
        tools.append(tool)
    check_names(tools, field)
    return tuple(tools)


def check_tool(tool: Tool, where: str, schema_field: str, longest_name: int) -> None:
    """Raises ApiError for a name that is not allowed, and for a schema that is no object's."""
    field = where.partition(".")[0]
    if not NAME.fullmatch(tool.name) or len(tool.name) > longest_name:
        message = (
            f"{where}.name is {tool.name[:80]!r}; it must be 1 to {longest_name} letters, digits, underscores or dashes"
        )
        raise ApiError(400, message, field)
    if tool.schema.get("type", "object") != "object":
        message = f"{where}.{schema_field} has the type {tool.schema['type']!r:.60}; a tool's arguments are an object"
        raise ApiError(400, message, field)


def check_names(tools: Sequence[Tool], field: str) -> None:
    """Raises ApiError for a name that occurs twice."""
    name, count = Counter(tool.name for tool in tools).most_common(1)[0] if tools else ("", 0)
    if count > 1:
        raise ApiError(400, f"{field}: {count} tools have the name {name!r}; names must differ", field)


def content_rule(response_format: ResponseFormat | None, outputs: StructuredOutputs | None) -> ContentRule | None:
    """What the content must be; None if it may be any text. Raises ApiError for fields that do not fit together."""
    asked = response_format is not None and response_format.type != "text"
    if outputs is not None and asked:
        raise ApiError(
            400, "response_format and structured_outputs both say what the content is; give one", "response_format"
        )
    if outputs is not None:
        return _of_outputs(outputs)
    if response_format is None or not asked:
        return None
    if response_format.type == "json_object":
        return ContentRule("json")
    if response_format.json_schema is None:
        raise ApiError(400, "response_format.json_schema is missing", "response_format")
    schema = response_format.json_schema.schema_
    if schema is None:
        raise ApiError(400, "response_format.json_schema.schema is missing", "response_format")
    return ContentRule("json", schema)


def _of_outputs(outputs: StructuredOutputs) -> ContentRule:
    field = "structured_outputs"
    names = ("json_", "regex", "choice", "grammar", "json_object")
    given = [name for name in names if getattr(outputs, name) not in (None, False)]
    if len(given) != 1:
        raise ApiError(400, f"{field} must have exactly one of json, regex, choice, grammar and json_object", field)
    match given[0]:
        case "json_":
            return ContentRule("json", _schema(outputs.json_))
        case "regex":
            return ContentRule("regex", text=outputs.regex or "")
        case "choice":
            return ContentRule("choice", choices=tuple(outputs.choice or ()))
        case "grammar":
            return ContentRule("lark", text=outputs.grammar or "")
    return ContentRule("json")


def _schema(value: Any) -> dict[str, Any]:
    try:
        schema = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"structured_outputs.json is not JSON ({error})"[:300], "structured_outputs") from None
    if not isinstance(schema, dict):
        raise ApiError(
            400, "structured_outputs.json must be a JSON schema, an object or its JSON", "structured_outputs"
        )
    return schema
