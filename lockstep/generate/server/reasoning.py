"""How much a model reasons before it answers: what a request asks for, as values of the model's chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from lockstep.data.chat import readable_values
from lockstep.data.replies.form import BRACKETS, THINK_END
from lockstep.generate.server.api_error import ApiError

if TYPE_CHECKING:
    from lockstep.generate.server.service import Service

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS = "none, minimal, low, medium, high, xhigh or max"
DEFAULT_EFFORT = "medium"
"""Of OpenAI's APIs."""
EFFORT = "reasoning_effort"
"""The value of chat templates that says how much to reason."""
SWITCHES = ("enable_thinking", "thinking")
"""Values of chat templates that turn reasoning on and off."""


def effort_values(service: Service, effort: str | None, field: str, default: str = DEFAULT_EFFORT) -> dict[str, Any]:
    """The template's values for an effort; a template that does not read `reasoning_effort` may still turn reasoning
    off, for the effort none. default: the API's, which every model is taken to have without being told. field: the
    request's, for errors. Raises ApiError for an effort that the model cannot be told."""
    if effort is None:
        return {}
    switch, always = _switch(service), service.reply_form.channels
    if effort == "none" and switch:
        return {switch: False}
    if _reads(service, EFFORT) and not (effort == "none" and always):
        return {EFFORT: effort}
    if effort == default or (effort == "none" and not _reasons(service)):
        return {}
    if always:
        can = "the model always reasons; send low, medium or high"
    elif switch:
        can = f"it can only turn reasoning off: send 'none', or nothing, or {switch} in chat_template_kwargs"
    elif _reasons(service):
        can = "the model always reasons as it was trained to; remove it"
    else:
        can = "the model does not reason; remove it"
    message = f"{field}: this model's chat template has no way to ask for {effort!r}: {can}"
    raise ApiError(400, message, field.partition(".")[0], "unsupported_parameter")


def thinking_values(service: Service, enabled: bool) -> dict[str, Any]:
    """The template's values that turn reasoning on or off. Raises ApiError if the model does the opposite, and its
    template has no switch."""
    if switch := _switch(service):
        return {switch: enabled}
    if enabled == _reasons(service):
        return {}
    does = "never reasons" if enabled else "always reasons"
    message = f"thinking is {'enabled' if enabled else 'disabled'}, but this model {does}: its chat template has no "
    raise ApiError(400, f"{message}switch for it; remove thinking", "thinking")


def _reads(service: Service, name: str) -> bool:
    return name in readable_values(service.template)


def _switch(service: Service) -> str | None:
    return next((name for name in SWITCHES if _reads(service, name)), None)


def _reasons(service: Service) -> bool:
    """Whether the model reasons unless it is told not to."""
    source = service.template.source if service.template else ""
    shown = any(end in source for end in (THINK_END, *BRACKETS))
    return service.reply_form.channels or (service.reply_form.thinks and shown)
