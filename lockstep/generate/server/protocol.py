"""Request bodies: OpenAI's fields, additional ones, and fields that are ignored or refused."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from lockstep.data.messages import SHOWN_REASONING
from lockstep.errors import closest
from lockstep.generate.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from lockstep.generate.server.api_error import ApiError

LARGEST = 2**31 - 1
Item = TypeVar("Item")
Strictly = Annotated[list[Item], Field(fail_fast=True)]
"""A list that is refused at its first invalid item: a million invalid items would be a million errors."""
Prompts = Annotated[list[Item], Field(max_length=4096, fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
TokenId = Annotated[int, Field(ge=0, le=LARGEST)]

IGNORED = {
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
"""Fields that do not affect the response."""
IGNORED_IN_PARTS = {"cache_control", "id", "index"}
"""The same, of a message or of a part of it."""
UNSUPPORTED_IN_MESSAGES = {"audio", "function_call", "refusal", "tool_calls"}
"""OpenAI's message fields that are not supported: never taken for a misspelled field."""
NOTHING: tuple[Any, ...] = (None, False, "", [], {})
"""Values with which an unknown field of a part is accepted."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    # Of OpenAI.
    **dict.fromkeys(("audio", "prediction", "verbosity", "web_search_options"), ()),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), (0,)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(("tools", "functions"), ([],)),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    # Of vLLM and SGLang.
    **dict.fromkeys(("allowed_token_ids", "chat_template", "prompt_logprobs", "truncate_prompt_tokens"), ()),
    **dict.fromkeys(("guided_choice", "guided_grammar", "guided_json", "guided_regex", "structured_outputs"), ()),
    **dict.fromkeys(("add_special_tokens", "continue_final_message", "use_beam_search"), (False,)),
    **dict.fromkeys(("add_generation_prompt", "include_reasoning", "separate_reasoning"), (True,)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (True,)),
    **dict.fromkeys(("min_tokens", "priority"), (0,)),
    **dict.fromkeys(("length_penalty", "repetition_penalty"), (1,)),
    **dict.fromkeys(("bad_words", "documents"), ([],)),
    "chat_template_kwargs": ({},),
    "include_stop_str_in_output": (False,),
}
"""Unsupported fields, with the values that have no effect."""


class Options(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(strict=True, extra="allow")
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SamplingRequest(BaseModel):
    """The fields of both routes."""

    model_config = ConfigDict(strict=True, extra="allow")
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
    stream: bool | None = None
    stream_options: Options | None = None
    return_token_ids: bool | None = None
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

    def check_fields(self) -> None:
        """Raises ApiError for a field that would change the answer and is not supported."""
        fields = type(self).model_fields
        for name, value in (self.model_extra or {}).items():
            if name in IGNORED or value is None or any(_same(value, v) for v in NEUTRAL.get(name, ())):
                continue
            if name in NEUTRAL:
                raise ApiError(400, f"{name} is not supported here; remove it", name[:64], "unsupported_parameter")
            hint = _hint(name, self)
            if not hint and not closest(name[:64], fields) and closest(name[:64], NEUTRAL):
                hint = " It looks like one that is not supported here; remove it"
            raise ApiError(400, f"unknown field {name[:64]!r}.{hint or ' Remove it'}", name[:64], "unknown_parameter")
        if self.stream_options is not None:
            _refuse_unknown(self.stream_options, "stream_options", ())
            if not self.stream:
                raise ApiError(400, "stream_options needs stream: true", "stream_options")
        if self.return_routes and not self.return_token_ids:
            raise ApiError(
                400,
                "return_routes returns the routes of the returned token ids; also set return_token_ids: true",
                "return_routes",
            )
        if self.temperature and self.temperature < 0.01:
            raise ApiError(
                400, "temperature is below 0.01; use 0, which selects the likeliest token, or more", "temperature"
            )

    def sampling_params(self, max_tokens: int, top_logprobs: int) -> SamplingParams:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(0, self.top_k or 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            n=self.n or 1,
            seed=self.seed,
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
    best_of: int | None = Field(None, ge=1, le=LARGEST)
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
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ApiError(400, "best_of other than n is not supported here; remove it", "best_of")


class TextPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["text"]
    text: str


CONTENT = "a string, or a list of parts of type text"


class Message(BaseModel):
    """A turn of the conversation."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Strictly[TextPart] | None = Field(None, description=CONTENT)
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(None, description="what an earlier answer had as its reasoning")
    reasoning: str | None = Field(None, description="another name of reasoning_content")

    def plain(self, between: str = "\n") -> dict[str, Any]:
        """The message in the form that templates expect: the content is one string, its parts joined by `between`."""
        content = self.content
        text = between.join(part.text for part in content) if isinstance(content, list) else content or ""
        thought = self.reasoning_content or self.reasoning or None
        optional = {"name": self.name, "tool_call_id": self.tool_call_id, **dict.fromkeys(SHOWN_REASONING, thought)}
        return {"role": self.role, "content": text} | {k: v for k, v in optional.items() if v is not None}


class ChatRequest(SamplingRequest):
    """POST /v1/chat/completions."""

    messages: Prompts[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=LARGEST)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="an object of values that the chat template reads, such as enable_thinking"
    )

    @property
    def prompt_field(self) -> str:
        return "messages"

    @property
    def limit_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def check_fields(self) -> None:
        super().check_fields()
        for position, message in enumerate(self.messages):
            _refuse_unknown(message, f"messages.{position}")
            for number, part in enumerate(message.content if isinstance(message.content, list) else ()):
                _refuse_unknown(part, f"messages.{position}.content.{number}")
            if (message.reasoning_content or message.reasoning) and message.role != "assistant":
                raise ApiError(400, f"messages.{position}: only the assistant's messages have reasoning", "messages")
            if message.content is None and message.role != "assistant":
                raise ApiError(400, f"messages.{position}.content must be {CONTENT}", "messages")
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ApiError(400, "max_tokens and max_completion_tokens differ; give one", "max_tokens")


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


def _refuse_unknown(part: BaseModel, where: str, ignored: Collection[str] = IGNORED_IN_PARTS) -> None:
    """Raises ApiError for an unknown field of a part of the body, unless its value has no effect."""
    for name, value in (part.model_extra or {}).items():
        if name not in ignored and not any(_same(value, v) for v in NOTHING):
            hint = _hint(name, part)
            message = f"{where}.{name[:64]} is not supported here{f'.{hint}' if hint else '; remove it'}"
            raise ApiError(400, message, where.partition(".")[0], "unknown_parameter")


def _hint(name: str, part: BaseModel) -> str:
    """A hint at the unset field that an unknown one may mean; empty if it is closest to a field that is set."""
    fields = type(part).model_fields
    present = {field for field in part.model_fields_set if getattr(part, field) is not None}
    if name in UNSUPPORTED_IN_MESSAGES or present & {*difflib.get_close_matches(name[:64], fields, n=1)}:
        return ""
    return closest(name[:64], fields.keys() - present)


def _same(value: Any, neutral: Any) -> bool:
    # 0 == False and 1 == True, but a penalty of false is a mistake.
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
