"""Request bodies of Anthropic's Messages API: its fields, and those that are ignored or refused."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from lockstep.generate.server.api_error import ApiError
from lockstep.generate.server.protocol import (
    LARGEST,
    Prompts,
    SamplingRequest,
    Stop,
    TextOr,
    refuse_fields,
    refuse_unknown,
    refuse_unknown_in,
)
from lockstep.generate.server.tool_bodies import MOST_TOOLS, Part

IGNORED = {"cache_control", "diagnostics", "metadata", "service_tier", "user_profile_id", "workspace_id"}
"""Fields that do not affect the response."""
KEPT_THINKING = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("container", "fallbacks", "compaction", "inference_geo"), ()),
    "context_management": ({"edits": []}, KEPT_THINKING),
    "mcp_servers": ([],),
    "speed": ("standard",),
}
"""Unsupported fields, with the values that have no effect; `INSTEAD` has further ones."""
INSTEAD = {
    **dict.fromkeys(("output_format", "response_format"), 'send output_config: {"format": …}'),
    **dict.fromkeys(("max_completion_tokens", "max_output_tokens"), "send max_tokens"),
    "chat_template_kwargs": "send thinking",
    "parallel_tool_calls": "send tool_choice with disable_parallel_tool_use",
    "stop": "send stop_sequences",
}
"""What to send in place of a field of another API or an earlier version."""

BLOCKS = {
    "text": {"text"},
    "thinking": {"thinking", "signature"},
    "redacted_thinking": {"data"},
    "tool_use": {"id", "name", "input", "caller"},
    "tool_result": {"tool_use_id", "content", "is_error"},
}
"""The fields of each type of block."""
OPTIONAL = {"signature", "data", "caller", "content", "is_error"}
OF_ROLE = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}
"""The types of blocks in a role's messages."""


class TextBlock(Part):
    """A block of a system prompt or of a tool's result."""

    type: str = Field(description="a string")
    text: str | None = None


class Block(TextBlock):
    """A block of a message's content."""

    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = Field(None, description="an object")
    caller: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: TextOr[TextBlock] | None = Field(None, description="a string, or a list of blocks of type text")
    is_error: bool | None = None


class Turn(Part):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: TextOr[Block] = Field(description="a string, or a list of blocks")


class CustomTool(Part):
    """A tool that the client runs."""

    type: str | None = None
    name: str = Field(description="a string")
    description: str | None = None
    input_schema: dict[str, Any] | None = Field(None, description="a JSON schema of an object")
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = Field(None, description='["direct"]')


class ToolChoice(Part):
    type: Literal["auto", "any", "tool", "none"] = Field(description="auto, any, tool or none")
    name: str | None = Field(None, description="the name of a tool")
    disable_parallel_tool_use: bool | None = None


class Thinking(Part):
    type: Literal["enabled", "disabled", "adaptive"] = Field(description="enabled, disabled or adaptive")
    budget_tokens: int | None = Field(None, ge=1, le=LARGEST)
    display: Literal["summarized"] | None = Field(
        None, description="summarized, or left out: reasoning is always returned"
    )


class OutputFormat(Part):
    type: Literal["json_schema"] = Field(description="json_schema")
    schema_: dict[str, Any] = Field(alias="schema", description="a JSON schema, an object")


class OutputConfig(Part):
    format: OutputFormat | None = Field(default=None, description="an object with type and schema")
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountTokensRequest(BaseModel):
    """POST /v1/messages/count_tokens: the fields that determine the prompt."""

    model_config = ConfigDict(strict=True, extra="allow")
    model: str | None = None
    messages: Prompts[Turn] = Field(min_length=1)
    system: TextOr[TextBlock] | None = Field(None, description="a string, or a list of blocks of type text")
    tools: Annotated[list[CustomTool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = Field(
        None, description=f"a list of up to {MOST_TOOLS} tools"
    )
    tool_choice: ToolChoice | None = Field(None, description='an object such as {"type": "auto"}')
    thinking: Thinking | None = Field(None, description='an object such as {"type": "disabled"}')
    output_config: OutputConfig | None = Field(None, description="an object with format or effort")

    def check_fields(self) -> None:
        """Raises ApiError for a field or block that would change the answer and is not supported."""
        if (self.model_extra or {}).get("thread") is not None:
            # The client's tool runner sends it first, and after this code the whole conversation without it.
            message = "thread is not supported here: this server holds no conversations; send all messages without it"
            raise ApiError(400, message, "thread", "thread_unsupported_request")
        refuse_fields(self, IGNORED, dict.fromkeys(INSTEAD, ()) | NEUTRAL, INSTEAD)
        _check_blocks(self.system, "system", "system")
        for number, turn in enumerate(self.messages):
            where = f"messages.{number}"
            refuse_unknown(turn, where)
            _check_blocks(turn.content, f"{where}.content", turn.role)
        if self.messages[-1].role == "assistant":
            message = (
                "the last message is the assistant's, which would be continued; that is not supported here: end the "
                "conversation with a message of the user"
            )
            raise ApiError(400, message, "messages")
        for number, tool in enumerate(self.tools or ()):
            _check_tool(tool, f"tools.{number}")
        for name in ("tool_choice", "thinking", "output_config"):
            refuse_unknown_in(getattr(self, name), name)
        if self.tool_choice is not None and (self.tool_choice.type == "tool") != (self.tool_choice.name is not None):
            raise ApiError(400, "tool_choice has a name if and only if its type is tool", "tool_choice")


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1, le=LARGEST)
    temperature: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=0, le=LARGEST)
    stop_sequences: Annotated[list[Stop], Field(max_length=16, fail_fast=True)] | None = Field(
        None, description="up to 16 strings of 1 to 256 characters"
    )
    stream: bool | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    ignore_eos: bool | None = None

    def sampling(self) -> SamplingRequest:
        """The fields that determine how the reply is sampled."""
        same = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", "seed", "ignore_eos")
        return SamplingRequest(**{name: getattr(self, name) for name in same}, stop=self.stop_sequences)


def _check_blocks(content: str | Sequence[TextBlock] | None, where: str, role: str) -> None:
    if content is None or isinstance(content, str):
        return
    for number, block in enumerate(content):
        _check_block(block, f"{where}.{number}", OF_ROLE[role], role)
        if isinstance(block, Block):
            _check_blocks(block.content, f"{where}.{number}.content", "system")


def _check_block(block: TextBlock, where: str, types: Collection[str], role: str) -> None:
    field = where.partition(".")[0]
    if block.type not in BLOCKS:
        message = f"{where} is a block of type {block.type[:80]!r}, which is not supported here"
        raise ApiError(400, f"{message}; there are: {', '.join(types)}", field)
    if block.type not in types:
        raise ApiError(400, f"{where} is a block of type {block.type}; here only {', '.join(types)} may be", field)
    declared = block.model_fields_set & type(block).model_fields.keys()
    present = {name for name in declared if getattr(block, name) is not None} - {"type"}
    fields = BLOCKS[block.type]
    if missing := sorted(fields - OPTIONAL - present):
        raise ApiError(400, f"{where}.{missing[0]} is missing", field)
    if wrong := sorted(present - fields):
        raise ApiError(400, f"{where}.{wrong[0]} is not of a block of type {block.type}; remove it", field)
    refuse_unknown(block, where)


def _check_tool(tool: CustomTool, where: str) -> None:
    if tool.type not in (None, "custom"):
        message = (
            f"{where} has the type {tool.type[:80]!r}; tools that the server runs, or whose schema the model is meant "
            "to know, are not supported here: send tools with an input_schema"
        )
        raise ApiError(400, message, "tools", "unsupported_parameter")
    if tool.input_schema is None:
        raise ApiError(400, f"{where}.input_schema is missing", "tools")
    refuse_unknown_in(tool, where)
