"""Completions: prompts as text or tokens, continued."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lockstep.errors import UserError
from lockstep.generate.sampling_params import Completion
from lockstep.generate.server.answer import answer, check_count, encode, truncated
from lockstep.generate.server.api_error import ApiError
from lockstep.generate.server.prompt_logprobs import Echo, echo_of
from lockstep.generate.server.protocol import CompletionRequest
from lockstep.generate.server.service import Service
from lockstep.generate.server.tools import ReplyPlan
from lockstep.model import check_token_ids

COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens for completions; that of chats is the rest of the context."""
SHORT_ECHO = 64
"""Tokens; longer prompts are decoded one at a time."""


async def complete(service: Service, request: Request, body: CompletionRequest) -> Response:
    """POST /v1/completions."""
    whole = await _prompts(service, body)
    prompts = [truncated(service, body, prompt) for prompt in whole]
    plan = ReplyPlan(content=body.content_rule(), content_field=body.content_field)
    max_tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    begun = _begun(service, body, len(prompts), max_tokens)
    echo = await _echo(service, body, prompts, prompts == whole) if body.echo else None
    return await answer(service, request, body, prompts, max_tokens, body.logprobs, plan, False, begun, echo)


async def _prompts(service: Service, body: CompletionRequest) -> list[list[int]]:
    """The prompts' tokens."""
    prompt = body.prompt
    single = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
    each: list[Any] = [prompt] if single else list(prompt)
    check_count(service, len(each), body.samples, "n" if body.samples == (body.n or 1) else "best_of")
    if not all(each) or not each:
        raise ApiError(400, "a prompt is empty; give at least one token", "prompt")
    if isinstance(each[0], str):
        return await encode(service, each, "prompt")
    for number, tokens in enumerate(each):
        check_tokens(service, tokens, "prompt", "" if single else f" {number}")
    return each


async def _echo(service: Service, body: CompletionRequest, prompts: list[list[int]], whole: bool) -> Echo:
    """What is repeated of the prompts: the texts as they were given, if they are used as a whole."""
    given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    texts = [text for text in given if isinstance(text, str)] if whole else []
    work = partial(echo_of, service.tokenizer, prompts, texts or None, body.logprobs is not None)
    return work() if sum(map(len, prompts)) < SHORT_ECHO else await service.in_turn(work)


def check_tokens(service: Service, tokens: list[int], field: str, number: str = "") -> None:
    """Raises ApiError for tokens that the model does not have."""
    try:
        check_token_ids(tokens, service.engine.model.config.vocab_size, field + number)
    except UserError as error:
        raise ApiError(400, str(error), field) from error


def _begun(service: Service, body: CompletionRequest, prompts: int, max_tokens: int) -> list[Completion]:
    """The samples to continue; their log-probabilities are not needed, since the client has them."""
    if body.begun is None:
        return []
    if prompts > 1:
        raise ApiError(400, f"begun needs exactly one prompt, not {prompts}", "begun")
    for tokens in body.begun:
        if len(tokens) > max_tokens:
            message = f"begun has {len(tokens)} tokens of a sample, but max_tokens, including them, is {max_tokens}"
            raise ApiError(400, message, "begun")
        if tokens:
            check_tokens(service, tokens, "begun")
    return [Completion(tokens, [0.0] * len(tokens), "abort") for tokens in body.begun]
