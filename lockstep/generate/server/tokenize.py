"""Texts as tokens and back, in the format of vLLM's `/tokenize` and `/detokenize`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from lockstep.generate.server.answer import encode
from lockstep.generate.server.chats import chat_prompt, plan_of, template_values
from lockstep.generate.server.completions import check_tokens
from lockstep.generate.server.protocol import ChatRequest, Strictly, TokenId
from lockstep.generate.server.service import Service

MOST_TOKENS = 2**18
LONG = 1024
"""Tokens; longer lists are worked on one at a time."""


class TokenizePrompt(BaseModel):
    """POST /tokenize, of a text."""

    model_config = ConfigDict(strict=True, extra="forbid")
    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChat(ChatRequest):
    """POST /tokenize, of a chat: a request for the chat itself also counts its tokens."""

    return_token_strs: bool | None = None


class Detokenize(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(strict=True, extra="forbid")
    model: str | None = None
    tokens: Annotated[Strictly[TokenId], Field(max_length=MOST_TOKENS)]


class HasMessages(BaseModel):
    """Whether a body is that of a chat."""

    model_config = ConfigDict(extra="ignore")
    messages: Any = None


async def tokenize(service: Service, body: TokenizePrompt) -> Response:
    """The response to a text. Raises ApiError for one that is too long."""
    (tokens,) = await encode(service, [body.prompt], "prompt")
    if body.add_special_tokens is not False:
        before = service.tokenizer.added_before()
        tokens = tokens if tokens[: len(before)] == before else before + tokens
    return await tokenized(service, tokens, body.return_token_strs)


async def tokenize_chat(service: Service, body: TokenizeChat) -> Response:
    """The response to a chat."""
    plan = plan_of(service, body)
    prompt = await chat_prompt(service, body.messages, template_values(service, body), plan)
    return await tokenized(service, prompt, body.return_token_strs)


async def tokenized(service: Service, tokens: list[int], with_names: bool | None) -> Response:
    """The response with these tokens."""
    work = partial(_listed, service, tokens, with_names)
    return Response(work() if len(tokens) < LONG else await service.in_turn(work), media_type="application/json")


def _listed(service: Service, tokens: list[int], with_names: bool | None) -> str:
    names = service.tokenizer.token_names(tokens) if with_names else None
    fields = {"count": str(len(tokens)), "max_model_len": str(service.context), "tokens": _json(tokens)}
    fields |= {"token_strs": "null" if names is None else _json(names)}
    return "{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}"


def _json(values: Sequence[int | str]) -> str:
    """A list, in parts: no other thread runs while one is encoded."""
    parts = (json.dumps(values[begin : begin + LONG])[1:-1] for begin in range(0, len(values), LONG))
    return f"[{', '.join(parts)}]"


async def detokenize(service: Service, tokens: list[int]) -> dict[str, Any]:
    """The text of tokens. Raises ApiError for some that the model does not have."""
    work = partial(_text, service, tokens)
    return {"prompt": work() if len(tokens) < LONG else await service.in_turn(work)}


def _text(service: Service, tokens: list[int]) -> str:
    if tokens:
        check_tokens(service, tokens, "tokens")
    return service.tokenizer.decode(tokens, special=True)
