"""How the reply to a conversation is sampled and read: its tools, which calls it may have, what its content must be."""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Literal

from lockstep.data.replies import PLAIN, ReplyForm, ToolFormat, last_mark, reply_form
from lockstep.errors import UserError
from lockstep.generate.grammars import json_grammar
from lockstep.generate.server.api_error import ApiError
from lockstep.generate.server.call_rules import Tool
from lockstep.generate.server.reply_grammar import CallRule, ContentRule, reply_grammar
from lockstep.generate.server.schema_check import (
    control_characters,
    is_endless,
    miscounted_keys,
    patterns,
    unknown_keyword,
)

if TYPE_CHECKING:
    from lockstep.generate.server.service import Service

ToolChoice = Literal["none", "auto", "required"] | tuple[str]
"""A tuple has the name of the tool to call."""

MOST_PATTERNS = 32
"""Of a schema that cannot be compiled, which are tried one by one."""


@dataclass(frozen=True)
class ReplyPlan:
    """How a reply is sampled and read, for any of the APIs."""

    form: ReplyForm = PLAIN
    """How it is read."""
    tools: tuple[Tool, ...] = ()
    """Those that the prompt shows."""
    choice: ToolChoice = "auto"
    parallel: bool = True
    """Whether it may have several calls."""
    content: ContentRule | None = None
    """What its content must be; None: any text."""
    content_field: str = "response_format"
    """The request's field that says so."""
    call_prefix: str = "call_"
    """Of the calls' ids."""

    @property
    def described(self) -> list[dict[str, Any]] | None:
        """The template's value `tools`."""
        return [tool.described() for tool in self.tools] or None

    def call_id(self) -> str:
        """A new id for a call."""
        if self.form.calls is not None and self.form.calls.family == "mistral":
            # Its templates refuse others in the history.
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"{self.call_prefix}{secrets.token_hex(12)}"


def plan_reply(
    service: Service,
    tools: Sequence[Tool] = (),
    choice: ToolChoice = "auto",
    parallel: bool = True,
    content: ContentRule | None = None,
    content_field: str = "response_format",
) -> ReplyPlan:
    """The plan of a chat's reply. Raises ApiError for tools that the model's template or format does not have, and for
    a choice that fits none of them."""
    if isinstance(choice, tuple) and choice[0] not in {tool.name for tool in tools}:
        raise ApiError(400, f"tool_choice names {choice[0][:80]!r}, which is not one of the tools", "tool_choice")
    if choice == "required" and not tools:
        raise ApiError(400, "tool_choice requires a call, but there are no tools", "tool_choice")
    if not tools or choice == "none":
        # Tools that may not be called are not shown either.
        return ReplyPlan(service.reply_form, content=content, content_field=content_field)
    form = _tool_form(service).with_tools([tool.described() for tool in tools])
    return ReplyPlan(form, tuple(tools), choice, parallel, content, content_field)


def _tool_form(service: Service) -> ReplyForm:
    """Raises ApiError if the model cannot be shown tools, or its calls cannot be read."""
    template = service.template
    assert template is not None  # a chat without one is refused before
    used = template.used_with([])
    if "tools" not in used.variables:
        message = "the model's chat template does not show tools, so the model would not see them; remove them"
        raise ApiError(400, message, "tools", "tools_not_supported")
    form = reply_form(service.tokenizer, used.source, True)
    if form.calls is None:
        message = (
            "the model's chat template writes calls in a format that is not known here, so none would be read; "
            'remove the tools, or send tool_choice: "none"'
        )
        raise ApiError(400, message, "tools", "tools_not_supported")
    return form


async def grammar_for(service: Service, plan: ReplyPlan, prompt: Sequence[int]) -> str:
    """The grammar of the reply to a prompt, compiled; empty if it may be any text.

    Raises ApiError (`unsupported_schema`) for a schema or grammar that is invalid, cannot be satisfied, or has parts
    that would not be enforced.
    """
    calls = _call_rule(plan)
    if calls is None and plan.content is None:
        return ""
    after = last_mark(plan.form, service.tokenizer, prompt) if plan.form.thinks else ""
    # Outside of the event loop's and the engine's threads: a large schema takes tenths of a second.
    return await service.in_turn(partial(_compiled, service, plan, after, calls))


def _call_rule(plan: ReplyPlan) -> CallRule | None:
    if not plan.tools:
        return None
    required = plan.choice != "auto"
    strict = any(tool.strict for tool in plan.tools)
    format = plan.form.calls
    assert format is not None
    if not required and plan.content is None and not (strict and _begins_with_token(plan.form, format)):
        return None
    named = plan.choice[0] if isinstance(plan.choice, tuple) else None
    tools = [tool for tool in plan.tools if named in (None, tool.name)]
    # An endless grammar compiles, but no sample of it ends.
    return CallRule([(tool, tool.strict or not is_endless(tool.schema)) for tool in tools], required, plan.parallel)


def _begins_with_token(form: ReplyForm, format: ToolFormat) -> bool:
    """Whether the beginning of a call can be told from text while it is sampled."""
    return not format.marks or format.family == "llama3" or format.marks[0] in form.ids.values()


def _compiled(service: Service, plan: ReplyPlan, after: str, calls: CallRule | None) -> str:
    _check_keywords(plan)
    try:
        return _compile(service, plan, after, calls)
    except UserError as error:
        field = plan.content_field if plan.content is not None else "tools"
        problem = ApiError(400, str(error), field, "unsupported_schema")
    if calls is None:
        raise problem
    # Only a strict tool's arguments must fit its schema; those of others do where it can be enforced.
    tools = [(tool, enforced and _is_enforced(service, plan, tool)) for tool, enforced in calls.tools]
    loose = replace(calls, tools=tools)
    if loose == calls:
        raise problem
    try:
        return _compile(service, plan, after, loose)
    except UserError:
        raise problem from None


def _compile(service: Service, plan: ReplyPlan, after: str, calls: CallRule | None) -> str:
    grammar = reply_grammar(plan.form, after, plan.content, calls)
    try:
        service.engine.grammars.compile(grammar, plan.content.free_grammar() if plan.content is not None else "")
    except UserError as error:
        schemas = [tool.schema for tool, enforced in calls.tools if enforced] if calls else []
        if plan.content is not None and plan.content.schema is not None:
            schemas.append(plan.content.schema)
        if pattern := _unusable_pattern(service, schemas):
            raise UserError(f"{error}; the pattern is {pattern!r:.120}") from error
        raise
    return grammar


def _unusable_pattern(service: Service, schemas: Sequence[Mapping[str, Any]]) -> str:
    """The first of some patterns that is the reason for an error; empty if none is."""
    for pattern in islice(chain.from_iterable(map(patterns, schemas)), MOST_PATTERNS):
        try:
            service.engine.grammars.compile(json_grammar({"type": "string", "pattern": pattern}))
        except UserError:
            return pattern
    return ""


def _is_enforced(service: Service, plan: ReplyPlan, tool: Tool) -> bool:
    """Whether the arguments of a tool must fit its schema. Raises ApiError for a strict tool whose schema cannot be."""
    try:
        _compile(service, replace(plan, content=None), "", CallRule([(tool, True)], True, False))
    except UserError as error:
        if tool.strict:
            raise ApiError(400, f"the tool {tool.name}: {error}", "tools", "unsupported_schema") from error
        return False
    return True


CHECKS = (
    (unknown_keyword, "is not a keyword that is enforced; remove it"),
    (miscounted_keys, "is not enforced where other keys than the required ones are free: they could be the same"),
    (control_characters, "has control characters, which are not written in JSON"),
)


def _check_keywords(plan: ReplyPlan) -> None:
    """Raises ApiError for what the compiler accepts in silence."""
    schemas = [(f"the tool {tool.name}", tool.schema, "tools") for tool in plan.tools if tool.strict]
    if plan.content is not None and plan.content.schema is not None:
        schemas.append(("the schema", plan.content.schema, plan.content_field))
    for what, schema, field in schemas:
        for finds, problem in CHECKS:
            if path := finds(schema):
                raise ApiError(400, f"{what}: {path[:120]} {problem}", field, "unsupported_schema")
        if is_endless(schema):
            message = f"{what} cannot be satisfied: every value would contain another one without end"
            raise ApiError(400, message, field, "unsupported_schema")
