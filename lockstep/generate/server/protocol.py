"""Request bodies: OpenAI's fields, additional ones, and fields that are ignored or refused."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from lockstep.data.chat import ChatTemplateError
from lockstep.data.messages import SHOWN_REASONING, CallLayout
from lockstep.errors import closest
from lockstep.generate.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from lockstep.generate.server.api_error import ApiError
from lockstep.generate.server.reasoning import EFFORTS, Effort
from lockstep.generate.server.reply_grammar import ContentRule
from lockstep.generate.server.tool_bodies import (
    CHOICE,
    MOST_TOOLS,
    CallBody,
    Choice,
    NamedChoice,
    ResponseFormat,
    StructuredOutputs,
    ToolBody,
    content_rule,
    tools_of,
)
from lockstep.generate.server.tools import ReplyPlan, plan_reply

if TYPE_CHECKING:
    from lockstep.generate.server.service import Service

LARGEST = 2**31 - 1
Item = TypeVar("Item")
Strictly = Annotated[list[Item], Field(fail_fast=True)]
"""A list that is refused at its first invalid item: a million invalid items would be a million errors."""
Prompts = Annotated[list[Item], Field(max_length=4096, fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
TokenId = Annotated[int, Field(ge=0, le=LARGEST)]
TokenIdName = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]

IGNORED = {
    "metadata",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
"""Fields that do not affect the response."""
IGNORED_IN_PARTS = {"cache_control", "id", "index"}
"""The same, of a message or of a part of it."""
UNSUPPORTED_IN_MESSAGES = {"audio", "function_call", "refusal"}
"""OpenAI's message fields that are not supported: never taken for a misspelled field."""
NOTHING: tuple[Any, ...] = (None, False, "", [], {})
"""Values with which an unknown field of a part is accepted."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    # Of OpenAI.
    **dict.fromkeys(("audio", "prediction", "reasoning_effort", "web_search_options"), ()),
    "verbosity": ("medium",),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(("tools", "functions"), ([],)),
    "echo": (False,),
    "suffix": ("",),
    "modalities": (["text"],),
    # Of vLLM and SGLang.
    **dict.fromkeys(("allowed_token_ids", "chat_template"), ()),
    **dict.fromkeys(("guided_choice", "guided_grammar", "guided_json", "guided_regex"), ()),
    **dict.fromkeys(("add_special_tokens", "continue_final_message", "use_beam_search"), (False,)),
    **dict.fromkeys(("add_generation_prompt", "include_reasoning", "separate_reasoning"), (True,)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (True,)),
    "priority": (0,),
    "length_penalty": (1,),
    "truncation_side": ("left",),
    **dict.fromkeys(("bad_words", "documents"), ([],)),
    "chat_template_kwargs": ({},),
    "include_stop_str_in_output": (False,),
}
"""Unsupported fields, with the values that have no effect."""
INSTEAD = {
    "functions": "send tools",
    "function_call": "send tool_choice",
    "guided_json": 'send structured_outputs: {"json": …}',
    "guided_regex": 'send structured_outputs: {"regex": …}',
    "guided_choice": 'send structured_outputs: {"choice": …}',
    "guided_grammar": 'send structured_outputs: {"grammar": …}',
}
"""What to send in place of an unsupported field, where it is not to be removed."""


WITH_DEFAULTS = (
    "temperature", "top_k", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
)  # fmt: skip
"""Fields whose defaults a model's generation configuration may have."""


class Options(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(strict=True, extra="allow")
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SamplingRequest(BaseModel):
    """The fields of every route."""

    model_config = ConfigDict(strict=True, extra="allow")
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL
    instead: ClassVar[Mapping[str, str]] = INSTEAD
    model: str | None = None
    max_tokens: int | None = Field(None, ge=1, le=LARGEST)
    temperature: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, le=LARGEST)
    min_p: float | None = Field(None, ge=0, lt=1, allow_inf_nan=False)
    n: int | None = Field(None, ge=1, le=LARGEST)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stop | Annotated[list[Stop], Field(max_length=16, fail_fast=True)] | None = Field(
        None, description="a string, or up to 16 strings, of 1 to 256 characters"
    )
    stop_token_ids: Strictly[TokenId] | None = Field(None, max_length=1024)
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0, le=LARGEST)
    logit_bias: dict[TokenIdName, Bias] | None = Field(
        None, description="an object of biases from -100 to 100 by token id, as a string"
    )
    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, gt=0, le=100, allow_inf_nan=False)
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=LARGEST, description="the number of the prompt's last tokens to keep, or -1: as many as fit"
    )
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    stream: bool | None = None
    stream_options: Options | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = Field(None, description="an object with type")
    structured_outputs: StructuredOutputs | None = Field(
        None, description="an object with one of json, regex, choice, grammar and json_object"
    )
    return_routes: Literal["digest", "whole"] | None = Field(
        None, description="digest or whole: the experts of each token, in addition to its id (return_token_ids)"
    )

    @property
    def prompt_field(self) -> str:
        """The name of the field with the prompts."""
        return "prompt"

    @property
    def limit_field(self) -> str:
        """The name of the field that limits the new tokens."""
        return "max_tokens"

    @property
    def samples(self) -> int:
        """How many samples of each prompt are drawn."""
        return self.n or 1

    @property
    def top_of_prompt(self) -> int | None:
        """How many of the likeliest tokens the response has in place of each of the prompt's; None: it has no
        log-probabilities of the prompt."""
        return self.prompt_logprobs

    def check_fields(self) -> None:
        """Raises ApiError for a field that would change the answer and is not supported."""
        refuse_fields(self, IGNORED, self.neutral, self.instead)
        for part in ("response_format", "structured_outputs"):
            refuse_unknown_in(getattr(self, part), part)
        if self.stream_options is not None:
            refuse_unknown(self.stream_options, "stream_options", ())
            if not self.stream:
                raise ApiError(400, "stream_options needs stream: true", "stream_options")
        if self.return_routes and not self.return_token_ids:
            raise ApiError(
                400,
                "return_routes returns the routes of the returned token ids; also set return_token_ids: true",
                "return_routes",
            )
        if self.truncate_prompt_tokens == 0:
            raise ApiError(400, "truncate_prompt_tokens is 0; keep at least one token", "truncate_prompt_tokens")
        if self.prompt_logprobs is not None and self.stream:
            raise ApiError(400, "prompt_logprobs are not in streams; remove stream or them", "prompt_logprobs")
        if self.temperature and self.temperature < 0.01:
            raise ApiError(
                400, "temperature is below 0.01; use 0, which selects the likeliest token, or more", "temperature"
            )

    @property
    def content_field(self) -> str:
        """The name of the field that says what the content must be."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    def content_rule(self) -> ContentRule | None:
        """What the content must be; None if it may be any text. Raises ApiError for fields that contradict."""
        return content_rule(self.response_format, self.structured_outputs)

    def sampling_params(
        self, max_tokens: int, top_logprobs: int, defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> SamplingParams:
        """defaults: of `SamplingParams`, where the request has no value. Raises ApiError for more `min_tokens` than
        `max_tokens`."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        given = {name: getattr(self, name) for name in WITH_DEFAULTS}
        given = {name: value for name, value in given.items() if value is not None}
        if (self.min_tokens or 0) > max_tokens:
            message = f"min_tokens {self.min_tokens} is more than {self.limit_field} {max_tokens}"
            raise ApiError(400, message, "min_tokens")
        sampling = {name: value for name, value in defaults.items() if name in WITH_DEFAULTS} | given
        return SamplingParams(
            **sampling | {"top_k": max(0, sampling.get("top_k", 0))},
            max_tokens=max_tokens,
            n=self.samples,
            seed=self.seed,
            min_tokens=self.min_tokens or 0,
            logit_bias=tuple((int(token), bias) for token, bias in (self.logit_bias or {}).items()),
            prompt_logprobs=self.top_of_prompt,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            top_logprobs=top_logprobs,
            routes=self.return_routes or "",
        )


class CompletionRequest(SamplingRequest):
    """POST /v1/completions."""

    prompt: str | Prompts[str] | Strictly[int] | Prompts[Strictly[int]] = Field(
        description="a string, a list of token ids, or up to 4096 strings or lists of token ids"
    )
    logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description=f"a number from 0 to {MAX_TOP_LOGPROBS}; true is only for chats"
    )
    max_tokens: int | None = Field(None, ge=0, le=LARGEST)
    best_of: int | None = Field(None, ge=1, le=LARGEST)
    echo: bool | None = None
    begun: Prompts[Strictly[TokenId]] | None = Field(
        None, description="the tokens of each of the n samples so far, after which sampling continues"
    )

    def check_fields(self) -> None:
        super().check_fields()
        if self.begun is not None and len(self.begun) != (self.n or 1):
            message = f"begun has the tokens of {len(self.begun)} samples; give those of all {self.n or 1}"
            raise ApiError(400, message, "begun")
        if self.begun is not None and self.seed is None:
            raise ApiError(
                400, "begun needs the tokens of its samples and a seed, the one they were sampled with", "seed"
            )
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens is 0, which needs echo: true", "max_tokens")
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise ApiError(400, f"best_of is {self.best_of}, less than n, {self.n}", "best_of")
        if self.samples > (self.n or 1) and (self.stream or self.begun is not None):
            other = "stream" if self.stream else "begun"
            raise ApiError(400, f"best_of chooses among finished samples; remove it or {other}", "best_of")
        if self.echo and self.begun is not None:
            raise ApiError(400, "echo returns a prompt, not the samples of begun; remove one of them", "echo")

    @property
    def samples(self) -> int:
        return self.best_of or self.n or 1

    @property
    def top_of_prompt(self) -> int | None:
        echoed = self.logprobs if self.echo else None
        return None if echoed is None and self.prompt_logprobs is None else max(echoed or 0, self.prompt_logprobs or 0)


class TextPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["text"] = Field(description="text: other parts are not supported here")
    text: str


def text_or_parts(value: Any) -> str:
    """The form of a content, so that what is wrong about a part of it is said of the part."""
    return "(text)" if isinstance(value, str) else "(parts)"


TextOr = Annotated[
    Annotated[str, Tag("(text)")] | Annotated[Strictly[Item], Tag("(parts)")], Discriminator(text_or_parts)
]
CONTENT = "a string, or a list of parts of type text"


class Message(BaseModel):
    """A turn of the conversation."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextOr[TextPart] | None = Field(default=None, description=CONTENT)
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(default=None, description="what an earlier answer had as its reasoning")
    reasoning: str | None = Field(default=None, description="another name of reasoning_content")
    tool_calls: Strictly[CallBody] | None = Field(
        default=None, max_length=1024, description="a list of up to 1024 calls"
    )

    def plain(self, between: str = "\n", layout: CallLayout | None = None) -> dict[str, Any]:
        """The message in the form that templates expect: the content is one string, its parts joined by `between`.

        layout: what the template expects of calls. Raises ChatTemplateError for calls that it cannot be given.
        """
        content = self.content
        text = between.join(part.text for part in content) if isinstance(content, list) else content or ""
        thought = self.reasoning_content or self.reasoning or None
        optional = {"name": self.name, "tool_call_id": self.tool_call_id, **dict.fromkeys(SHOWN_REASONING, thought)}
        message = {"role": self.role, "content": text} | {k: v for k, v in optional.items() if v is not None}
        if not self.tool_calls:
            return message
        if layout is None:
            raise ChatTemplateError("the model's chat template does not show tool calls")
        return layout.message(message | {"tool_calls": [call.plain() for call in self.tool_calls]})


class ChatRequest(SamplingRequest):
    """POST /v1/chat/completions."""

    messages: Prompts[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=LARGEST)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="an object of values that the chat template reads, such as enable_thinking"
    )
    reasoning_effort: Effort | None = Field(None, description=EFFORTS)
    tools: Annotated[list[ToolBody], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = Field(
        None, description=f"a list of up to {MOST_TOOLS} tools"
    )
    tool_choice: Choice | None = Field(None, description=CHOICE)
    parallel_tool_calls: bool | None = None

    @property
    def prompt_field(self) -> str:
        return "messages"

    @property
    def limit_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def check_fields(self) -> None:
        super().check_fields()
        for position, message in enumerate(self.messages):
            refuse_unknown(message, f"messages.{position}")
            for number, part in enumerate(message.content if isinstance(message.content, list) else ()):
                refuse_unknown(part, f"messages.{position}.content.{number}")
            if (message.reasoning_content or message.reasoning) and message.role != "assistant":
                raise ApiError(400, f"messages.{position}: only the assistant's messages have reasoning", "messages")
            for number, call in enumerate(message.tool_calls or ()):
                refuse_unknown_in(call, f"messages.{position}.tool_calls.{number}")
                if message.role != "assistant":
                    raise ApiError(400, f"messages.{position}: only the assistant's messages have calls", "messages")
            if message.content is None and message.role != "assistant":
                raise ApiError(400, f"messages.{position}.content must be {CONTENT}", "messages")
        for number, tool in enumerate(self.tools or ()):
            refuse_unknown_in(tool, f"tools.{number}")
        refuse_unknown_in(self.tool_choice, "tool_choice")
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ApiError(400, "max_tokens and max_completion_tokens differ; give one", "max_tokens")

    def plan(self, service: Service) -> ReplyPlan:
        """How the reply is sampled and read. Raises ApiError for tools that are invalid or of no use to the model."""
        choice = self.tool_choice or "auto"
        return plan_reply(
            service,
            tools_of(self.tools or ()),
            (choice.function.name,) if isinstance(choice, NamedChoice) else choice,
            self.parallel_tool_calls is not False,
            self.content_rule(),
            self.content_field,
        )


class WeightsRequest(BaseModel):
    """POST /admin/weights."""

    model_config = ConfigDict(strict=True, extra="forbid")
    path: str | None = Field(None, min_length=1, max_length=4096)
    version: int | None = Field(None, ge=0, lt=2**63)


class LoadAdapterRequest(BaseModel):
    """POST /v1/load_lora_adapter."""

    model_config = ConfigDict(strict=True, extra="forbid")
    lora_name: str = Field(min_length=1, max_length=256, description="a name of 1 to 256 characters")
    lora_path: str = Field(min_length=1, max_length=4096, description="a path of 1 to 4096 characters")
    base_model_name: str | None = None


class UnloadAdapterRequest(BaseModel):
    """POST /v1/unload_lora_adapter."""

    model_config = ConfigDict(strict=True, extra="forbid")
    lora_name: str = Field(min_length=1, max_length=256, description="a name of 1 to 256 characters")
    lora_int_id: int | None = None


def refuse_fields(
    body: BaseModel, ignored: Collection[str], neutral: Mapping[str, tuple[Any, ...]], instead: Mapping[str, str]
) -> None:
    """Raises ApiError for a field of a body that it does not declare, unless it is ignored or its value has no effect.

    neutral: unsupported fields, with such values. instead: what to send in place of one, where it is not to be removed.
    """
    for name, value in (body.model_extra or {}).items():
        if name in ignored or value is None or any(_same(value, v) for v in neutral.get(name, ())):
            continue
        if name in neutral:
            message = f"{name} is not supported here; {instead.get(name, 'remove it')}"
            raise ApiError(400, message, name[:64], "unsupported_parameter")
        hint = _hint(name, body)
        if not hint and not closest(name[:64], type(body).model_fields) and closest(name[:64], neutral):
            hint = " It looks like one that is not supported here; remove it"
        raise ApiError(400, f"unknown field {name[:64]!r}.{hint or ' Remove it'}", name[:64], "unknown_parameter")


def refuse_unknown_in(part: Any, where: str) -> None:
    """Raises ApiError for an unknown field of a part of the body, or of a part of that."""
    if isinstance(part, BaseModel):
        refuse_unknown(part, where)
        for name in type(part).model_fields:
            refuse_unknown_in(getattr(part, name), f"{where}.{name.rstrip('_')}")


def refuse_unknown(part: BaseModel, where: str, ignored: Collection[str] = IGNORED_IN_PARTS) -> None:
    """Raises ApiError for an unknown field of a part of the body, unless its value has no effect."""
    for name, value in (part.model_extra or {}).items():
        if name not in ignored and not any(_same(value, v) for v in NOTHING):
            hint = _hint(name, part)
            message = f"{where}.{name[:64]} is not supported here{f'.{hint}' if hint else '; remove it'}"
            raise ApiError(400, message, where.partition(".")[0], "unknown_parameter")


def _hint(name: str, part: BaseModel) -> str:
    """A hint at the unset field that an unknown one may mean; empty if it is closest to a field that is set."""
    fields = {field.alias or key: key for key, field in type(part).model_fields.items()}
    present = {
        shown for shown, key in fields.items() if key in part.model_fields_set and getattr(part, key) is not None
    }
    if name in UNSUPPORTED_IN_MESSAGES or present & {*difflib.get_close_matches(name[:64], fields, n=1)}:
        return ""
    return closest(name[:64], fields.keys() - present)


def _same(value: Any, neutral: Any) -> bool:
    # 0 == False and 1 == True, but a penalty of false is a mistake.
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
