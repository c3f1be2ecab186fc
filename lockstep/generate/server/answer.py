"""From prompts to a response: what both routes share."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from lockstep.data import StreamDecoder, decoding_context
from lockstep.data.replies import PLAIN, ReplyForm, ReplyReader
from lockstep.errors import UserError
from lockstep.generate.sampling_params import Completion, SamplingParams
from lockstep.generate.server.access_log import RequestRecord, record_of
from lockstep.generate.server.api_error import ApiError
from lockstep.generate.server.engine_loop import PromptEvent
from lockstep.generate.server.protocol import SamplingRequest
from lockstep.generate.server.responses import Piece, Reply, ReplyWriter, usage_of
from lockstep.generate.server.service import Service
from lockstep.generate.server.text import GrowingText, StopString
from lockstep.generate.server.watch import EventStream

LONG_TEXT = 4096
"""Characters of a request's texts, about a millisecond of work, from which they are tokenized outside of the event
loop's thread."""
LONG_ANSWER = 4096
"""In tokens. Longer responses are serialized one at a time."""


async def encode(service: Service, texts: list[str], field: str) -> list[list[int]]:
    """The tokens of a request's texts, without special tokens added. Raises ApiError for a text that must be too
    long."""
    for text in texts:
        check_text(service, len(text), field)
    if sum(map(len, texts)) < LONG_TEXT:
        return [service.tokenizer.encode(text) for text in texts]
    # `encode_batch` even for one text: it computes no offsets, and releases the GIL.
    return await service.in_turn(partial(service.tokenizer.encode_batch, texts))


def check_text(service: Service, characters: int, field: str) -> None:
    """Call before any work on a text. Raises ApiError if it is too long even if all of its tokens are the longest."""
    limit = _longest_prompt(service)
    if characters > limit * service.tokenizer.longest_token:
        message = f"a prompt of {characters} characters has more than the {limit} tokens that this server allows"
        raise ApiError(400, message, field, "context_length_exceeded")


async def answer(
    service: Service,
    request: Request,
    body: SamplingRequest,
    prompts: list[list[int]],
    max_tokens: int,
    top_logprobs: int | None,
    chat: bool,
    begun: Sequence[Completion] = (),
) -> Response:
    """Samples the prompts and responds, streamed if requested.

    begun: with a single prompt, the tokens so far of its samples, which continue from there.
    """
    _check_length(service, prompts, max_tokens, body)
    params = replace(body.sampling_params(max_tokens, top_logprobs or 0), adapter=service.adapter_of(body.model))
    reply = Reply(
        id=("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12),
        created=int(time.time()),
        model=params.adapter or service.model_name,
        chat=chat,
        prompts=prompts,
        tokenizer=service.tokenizer,
        top_logprobs=top_logprobs,
        token_ids=bool(body.return_token_ids),
        with_usage=bool(body.stream_options and body.stream_options.include_usage),
    )
    record = record_of(request)
    record.stream = bool(body.stream)
    record.prompt_tokens = sum(map(len, prompts))
    # A completion is plain text: its reasoning is not parsed.
    form = service.reply_form if chat else PLAIN
    steps = _steps(service, record, prompts, params, begun, form)
    if not body.stream:
        return await _whole(service, reply, record, steps)
    # The first item is empty: the request has been accepted, and the response can begin.
    await anext(steps)
    chunks = _chunks(reply, record, steps)
    return EventStream(request, chunks, steps, service.limits)


def check_count(service: Service, prompts: int, n: int) -> None:
    """Call before any work on the prompts. Raises ApiError for more than the server ever accepts."""
    if n > service.config.max_n:
        raise ApiError(400, f"n is {n}; this server allows {service.config.max_n}", "n")
    limit = service.limits.max_sequences
    if prompts * n > limit:
        message = f"{prompts} prompts times n are {prompts * n} sequences, but the server allows {limit}; ask for fewer"
        raise ApiError(400, message, "n" if n > 1 else "prompt")


def _check_length(service: Service, prompts: list[list[int]], max_tokens: int, body: SamplingRequest) -> None:
    longest, limit = max(map(len, prompts)), _longest_prompt(service)
    if longest > limit:
        message = f"a prompt has {longest} tokens; this server allows {limit}"
        raise ApiError(400, message, body.prompt_field, "context_length_exceeded")
    if longest + max_tokens > service.context:
        message = (
            f"a prompt of {longest} tokens and {body.limit_field} {max_tokens} exceed the context of "
            f"{service.context}; shorten the prompt or lower {body.limit_field}"
        )
        raise ApiError(400, message, body.limit_field, "context_length_exceeded")


def _longest_prompt(service: Service) -> int:
    return service.config.max_prompt_tokens or service.context - 1


async def _steps(
    service: Service,
    record: RequestRecord,
    prompts: list[list[int]],
    params: SamplingParams,
    begun: Sequence[Completion],
    form: ReplyForm,
) -> AsyncGenerator[list[Piece], None]:
    """Yields an empty list once the engine has accepted the prompts, then what each step adds to the choices."""
    stop_ids = set(params.ending_ids(service.engine.model.config.eos_token_ids))
    stop = [StopString(text) for text in params.stop]
    choices = []
    for prompt in prompts:
        context = decoding_context(service.tokenizer, prompt)
        for _ in range(params.n):
            decoder = StreamDecoder(service.tokenizer, context)
            text = GrowingText(decoder, stop, stop_ids, ReplyReader(form, decoder, prompt))
            choices.append(_Choice(text, form is not PLAIN))
    if begun:
        await service.in_turn(partial(_push_begun, choices, begun))
    try:
        with service.limits.places(len(choices)):
            async with service.engine_loop.generation(prompts, params, begun) as generation:
                yield []
                async with aclosing(generation.events()) as batches:
                    async for batch in batches:
                        if record.first_token is None:
                            record.first_token = record.seconds
                            service.metrics.first_token(record.first_token)
                        record.completion_tokens += len(batch)
                        yield [_piece(service, choices, params.n, event) for event in batch]
    except UserError as error:
        raise ApiError(400, str(error)) from error
    except ApiError as error:
        record.aborted = {"engine_failed": "failure", "not_finite": "failure", "shutting_down": "shutdown"}.get(
            error.code or ""
        )
        raise


class _Choice:
    """A sample in progress."""

    def __init__(self, text: GrowingText, is_chat: bool):
        self.text, self.is_chat = text, is_chat
        self.tokens = 0
        self.first_token = 0.0


def _push_begun(choices: list[_Choice], begun: Sequence[Completion]) -> None:
    for choice, sample in zip(choices, begun, strict=True):
        for token in sample.token_ids:
            choice.text.push(token, last=False)


def _piece(service: Service, choices: list[_Choice], n: int, prompt_event: PromptEvent) -> Piece:
    position, event = prompt_event
    index = position * n + event.index
    choice = choices[index]
    choice.tokens += 1
    if choice.tokens == 1:
        choice.first_token = time.perf_counter()
    last = event.finish_reason is not None
    offset = choice.text.length
    text = choice.text.push(event.token_id, last)
    if last:
        service.metrics.sample_finished(time.perf_counter() - choice.first_token, choice.tokens)
    # A stop string may be completed by the replacement for an incomplete last character.
    reason = "stop" if last and choice.text.stopped else event.finish_reason
    # Not for completions, which may continue a begun sample.
    parts = choice.text.parts() if last and choice.is_chat else None
    return Piece(index, position, choice.tokens == 1, text, [event], [offset], reason, choice.text.reasoning, parts)


async def _whole(
    service: Service, reply: ReplyWriter, record: RequestRecord, steps: AsyncGenerator[list[Piece], None]
) -> Response:
    choices: dict[int, Piece] = {}
    async with aclosing(steps):
        async for pieces in steps:
            for piece in pieces:
                if piece.first:
                    choices[piece.index] = piece
                else:
                    choices[piece.index].add(piece)
    ordered = [choices[index] for index in sorted(choices)]
    for piece in ordered:
        if piece.parts is not None:
            piece.text, piece.reasoning = piece.parts.content, piece.parts.reasoning
    usage = usage_of(record.prompt_tokens, record.completion_tokens)
    # Many long samples have hundreds of thousands of log-probabilities.
    in_thread = service.in_turn if record.completion_tokens > LONG_ANSWER else asyncio.to_thread
    content = await in_thread(partial(reply.answer, ordered, usage))
    return Response(content, media_type="application/json")


async def _chunks(
    reply: ReplyWriter, record: RequestRecord, steps: AsyncGenerator[list[Piece], None]
) -> AsyncGenerator[str, None]:
    begun: set[int] = set()
    if beginning := reply.begin():
        yield beginning
    async with aclosing(steps):
        async for pieces in steps:
            events = []
            for piece in pieces:
                if reply.shows(piece):
                    piece.first = piece.index not in begun
                    begun.add(piece.index)
                    events.append(reply.chunk(piece))
            if events:
                yield "".join(events)
    yield reply.end(usage_of(record.prompt_tokens, record.completion_tokens))
