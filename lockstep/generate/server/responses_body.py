"""The body of `/v1/responses`: its fields, and what they mean for a chat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from lockstep.generate.sampling_params import MAX_TOP_LOGPROBS
from lockstep.generate.server.api_error import ApiError
from lockstep.generate.server.call_rules import Tool
from lockstep.generate.server.protocol import INSTEAD, LARGEST, NEUTRAL, Prompts, SamplingRequest, refuse_unknown_in
from lockstep.generate.server.reasoning import EFFORTS, Effort
from lockstep.generate.server.reply_grammar import ContentRule
from lockstep.generate.server.responses_items import InputItem, OtherItem
from lockstep.generate.server.tool_bodies import (
    LONGEST_NAME,
    MOST_TOOLS,
    Part,
    SchemaBody,
    ToolFunction,
    check_names,
    check_tool,
    content_rule,
)
from lockstep.generate.server.tools import ReplyPlan, ToolChoice, plan_reply

if TYPE_CHECKING:
    from lockstep.generate.server.service import Service

LOGPROBS = "message.output_text.logprobs"
OF_OTHER_TOOLS = {
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
}
"""Of `include`: parts of items that no response here has."""
INCLUDED = {LOGPROBS, "reasoning.encrypted_content", *OF_OTHER_TOOLS}
NOT_HERE = {
    "max_tokens": "send max_output_tokens",
    "n": "send a request for each",
    "response_format": 'send text: {"format": …}',
    **dict.fromkeys(("prompt_logprobs", "return_routes", "return_token_ids"), "send a chat"),
}
"""Fields of the other routes, and what to do instead."""


def _without_others(schema: dict[str, Any]) -> None:
    for name in NOT_HERE:
        schema["properties"].pop(name)


class FunctionTool(ToolFunction):
    """A tool."""

    type: Literal["function"]


def _tool_kind(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return "(other)" if isinstance(kind, str) and kind != "function" else "(function)"


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("(function)")] | Annotated[OtherItem, Tag("(other)")], Discriminator(_tool_kind)
]


class NamedTool(Part):
    type: Literal["function"] = Field(description="function: other kinds of tools are not supported here")
    name: str = Field(description="the name of a tool")


class ChosenTools(Part):
    """Which tool to call, or which of them."""

    type: Literal["function", "allowed_tools"] = Field(description="function or allowed_tools")
    name: str | None = None
    mode: Literal["auto", "required"] | None = Field(None, description="auto or required")
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MOST_TOOLS, fail_fast=True)] | None = Field(
        None, description="a list of tools, each as an object with type and name"
    )


CHOICE = 'none, auto, required, {"type": "function", "name": …} or {"type": "allowed_tools", "mode": …, "tools": […]}'


class FormatBody(SchemaBody):
    """What the content must be."""

    type: Literal["text", "json_object", "json_schema"] = Field(description="text, json_object or json_schema")


class TextBody(Part):
    format: FormatBody | None = Field(None, description="an object with type, and for json_schema name and schema")
    verbosity: str | None = None


class ReasoningBody(Part):
    effort: Effort | None = Field(None, description=EFFORTS)
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(SamplingRequest):
    """POST /v1/responses."""

    model_config = ConfigDict(json_schema_extra=_without_others)
    neutral: ClassVar = NEUTRAL | {
        **dict.fromkeys(("conversation", "max_completion_tokens", "max_tool_calls", "messages", "moderation"), ()),
        "background": (False,),
        "context_management": ([],),
        "logprobs": (False,),
        "prompt": (),
    }
    instead: ClassVar = INSTEAD | {
        "conversation": "send previous_response_id",
        "logprobs": f'send include: ["{LOGPROBS}"]',
        "max_completion_tokens": "send max_output_tokens",
        "messages": "send input",
        "prompt": "send input",
        "reasoning_effort": 'send reasoning: {"effort": …}',
    }
    input: Annotated[
        Annotated[str, Tag("(text)")] | Annotated[Prompts[InputItem], Tag("(items)")],
        Discriminator(lambda value: "(text)" if isinstance(value, str) else "(items)"),
    ] = Field(description="a string, or a list of up to 4096 items")
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=128, description="a string of up to 128 characters")
    store: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=LARGEST)
    tools: Annotated[list[AnyTool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTools | None = Field(None, description=CHOICE)
    parallel_tool_calls: bool | None = None
    text: TextBody | None = Field(None, description="an object with format")
    reasoning: ReasoningBody | None = Field(None, description="an object with effort")
    include: Annotated[list[str], Field(max_length=64)] | None = Field(None, description="a list of strings")
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    truncation: str | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16, description="an object of up to 16 strings")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="an object of values that the chat template reads, such as enable_thinking"
    )

    @property
    def prompt_field(self) -> str:
        return "input"

    @property
    def limit_field(self) -> str:
        return "max_output_tokens"

    @property
    def content_field(self) -> str:
        return "text" if self.structured_outputs is None else "structured_outputs"

    @property
    def includes_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def functions(self) -> list[FunctionTool]:
        """The tools, all of which are functions once `check_fields` has passed."""
        return [tool for tool in self.tools or () if isinstance(tool, FunctionTool)]

    def check_fields(self) -> None:
        for name, instead in NOT_HERE.items():
            if getattr(self, name) not in (None, False) and (name, getattr(self, name)) != ("n", 1):
                raise ApiError(400, f"{name} is not supported here; {instead}", name, "unsupported_parameter")
        super().check_fields()
        if self.stream_options is not None and self.stream_options.include_usage is not None:
            raise ApiError(400, "stream_options.include_usage: a stream here always has usage", "stream_options")
        self._check_parts()
        for name in self.include or ():
            if name not in INCLUDED:
                raise ApiError(400, f"include has {name[:64]!r}, which is not supported here; remove it", "include")
        if self.top_logprobs and not self.includes_logprobs:
            raise ApiError(400, f'top_logprobs needs include: ["{LOGPROBS}"]', "top_logprobs")
        if self.truncation not in (None, "disabled"):
            message = f"truncation must be disabled, not {self.truncation[:64]!r}; or send truncate_prompt_tokens"
            raise ApiError(400, message, "truncation", "unsupported_parameter")
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            raise ApiError(400, "text.verbosity is not supported here; remove it", "text", "unsupported_parameter")
        for name in ("summary", "generate_summary"):
            if getattr(self.reasoning, name, None) not in (None, "auto"):
                message = f"reasoning.{name}: reasoning is not summarized here, but returned as it is; remove it"
                raise ApiError(400, message, "reasoning", "unsupported_parameter")

    def _check_parts(self) -> None:
        """Raises ApiError for a part of the body that is not supported."""
        for position, item in enumerate(self.input if not isinstance(self.input, str) else ()):
            item.check(f"input.{position}")
        for number, tool in enumerate(self.tools or ()):
            if isinstance(tool, OtherItem):
                message = f"tools.{number} is {tool.type[:64]!r}; only tools of type function are supported here"
                raise ApiError(400, message, "tools", "unsupported_parameter")
            refuse_unknown_in(tool, f"tools.{number}")
        for name in ("tool_choice", "text", "reasoning"):
            refuse_unknown_in(getattr(self, name), name)
        chosen = self.tool_choice
        if isinstance(chosen, ChosenTools):
            missing = "name" if chosen.type == "function" else "tools"
            if getattr(chosen, missing) is None:
                raise ApiError(400, f"tool_choice.{missing} is missing", "tool_choice")

    def content_rule(self) -> ContentRule | None:
        format = self.text.format if self.text is not None else None
        if format is None or format.type == "text":
            return content_rule(None, self.structured_outputs)
        if self.structured_outputs is not None:
            raise ApiError(400, "text.format and structured_outputs both say what the content is; give one", "text")
        if format.type == "json_object":
            return ContentRule("json")
        if format.schema_ is None:
            raise ApiError(400, "text.format.schema is missing", "text")
        return ContentRule("json", format.schema_)

    def _tools(self) -> tuple[Tool, ...]:
        tools = []
        for number, tool in enumerate(self.functions):
            tools.append(Tool(tool.name, tool.description or "", tool.parameters, bool(tool.strict)))
            check_tool(tools[-1], f"tools.{number}", "parameters", LONGEST_NAME)
        check_names(tools, "tools")
        return tuple(tools)

    def plan(self, service: Service) -> ReplyPlan:
        """How the reply is sampled and read. Raises ApiError for tools that are invalid or of no use to the model."""
        tools = self._tools()
        choice: ToolChoice
        if not isinstance(self.tool_choice, ChosenTools):
            choice = self.tool_choice or "auto"
        elif self.tool_choice.type == "function":
            choice = (self.tool_choice.name or "",)
        else:
            # The model is shown no others, so that it calls none.
            allowed = {tool.name for tool in self.tool_choice.tools or ()}
            if unknown := allowed - {tool.name for tool in tools}:
                message = f"tool_choice names {min(unknown)[:80]!r}, which is not one of the tools"
                raise ApiError(400, message, "tool_choice")
            tools = tuple(tool for tool in tools if tool.name in allowed)
            choice = self.tool_choice.mode or "auto"
        parallel = self.parallel_tool_calls is not False
        return plan_reply(service, tools, choice, parallel, self.content_rule(), self.content_field)
