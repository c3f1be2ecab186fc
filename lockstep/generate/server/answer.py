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
from lockstep.data.replies import PLAIN, ReplyParts, ReplyReader
from lockstep.data.replies.form import Section
from lockstep.errors import UserError
from lockstep.generate.sampling_params import Completion, SamplingParams
from lockstep.generate.server.access_log import RequestRecord, record_of
from lockstep.generate.server.api_error import ApiError
from lockstep.generate.server.best_of import best_of
from lockstep.generate.server.engine_loop import PromptEvent
from lockstep.generate.server.prompt_logprobs import Echo, check_size
from lockstep.generate.server.protocol import SamplingRequest
from lockstep.generate.server.reply import CallPiece, Piece, Reply, ReplyWriter, Whole, usage_of
from lockstep.generate.server.service import Service
from lockstep.generate.server.text import GrowingText, StopString
from lockstep.generate.server.tools import ReplyPlan, grammar_for
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
        message = f"the prompt is too long: {characters} characters have more tokens than this server allows, {limit}"
        raise ApiError(400, message, field, "context_length_exceeded")


async def answer(
    service: Service,
    request: Request,
    body: SamplingRequest,
    prompts: list[list[int]],
    max_tokens: int,
    top_logprobs: int | None,
    plan: ReplyPlan,
    chat: bool,
    begun: Sequence[Completion] = (),
    echo: Echo | None = None,
    writer: ReplyWriter | None = None,
) -> Response:
    """Samples the prompts and responds, streamed if requested.

    plan: how the replies are sampled and read; prompts with a grammar end with the same tag. max_tokens: 0: the
    response has only the prompts; they are computed by sampling a token after each. begun: with a single prompt, the
    tokens so far of its samples, which continue from there. echo: what the response repeats of the prompts. writer: of
    another API than OpenAI's completions and chats.
    """
    only_prompt, max_tokens = max_tokens == 0, max(1, max_tokens)
    _check_length(service, prompts, max_tokens, body)
    check_size(body, prompts, 1 if chat else body.n or 1)
    grammar = await grammar_for(service, plan, prompts[0])
    params = body.sampling_params(max_tokens, top_logprobs or 0, service.sampling_defaults)
    params = replace(params, grammar=grammar, adapter=service.adapter_of(body.model))
    vocab = service.engine.model.config.vocab_size
    if wrong := next((token for token, _ in params.logit_bias if token >= vocab), None):
        raise ApiError(400, f"logit_bias has the token {wrong}, but the model's vocabulary has {vocab}", "logit_bias")
    reply = writer or Reply(
        id=("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12),
        created=int(time.time()),
        model=service.named(body.model),
        chat=chat,
        prompts=prompts,
        tokenizer=service.tokenizer,
        top_logprobs=top_logprobs,
        token_ids=bool(body.return_token_ids),
        with_usage=bool(body.stream_options and body.stream_options.include_usage),
        top_of_prompt=body.prompt_logprobs,
        echo=echo,
        only_prompt=only_prompt,
    )
    record = record_of(request)
    record.stream = bool(body.stream)
    record.prompt_tokens = sum(map(len, prompts))
    steps = _steps(service, record, prompts, params, begun, plan)
    if not body.stream:
        return await _whole(service, reply, record, steps, params, body.n or 1)
    # The first item is empty: the request has been accepted, and the response can begin.
    await anext(steps)
    chunks = _chunks(reply, record, steps)
    return EventStream(request, chunks, steps, reply, service.limits)


def check_count(service: Service, prompts: int, n: int, name: str = "n") -> None:
    """Call before any work on the prompts. name: of the field with n. Raises ApiError for more than the server ever
    accepts."""
    if n > service.config.max_n:
        raise ApiError(400, f"{name} is {n}; this server allows {service.config.max_n}", name)
    limit = service.limits.max_sequences
    if prompts * n > limit:
        message = (
            f"{prompts} prompts times {name} are {prompts * n} sequences, but the server allows {limit}; ask for fewer"
        )
        raise ApiError(400, message, name if n > 1 else "prompt")


def truncated(service: Service, body: SamplingRequest, prompt: list[int]) -> list[int]:
    """The last tokens of a prompt, as many as the request keeps."""
    keep = body.truncate_prompt_tokens
    if keep == -1:
        new = getattr(body, body.limit_field) or 1
        keep = max(1, min(_longest_prompt(service), service.context - new))
    return prompt if keep is None else prompt[-keep:]


def _check_length(service: Service, prompts: list[list[int]], max_tokens: int, body: SamplingRequest) -> None:
    # Clients know an error of the length by "prompt is too long" or "maximum context length is", not all by its code.
    longest, limit = max(map(len, prompts)), _longest_prompt(service)
    if longest > limit:
        message = f"the prompt is too long: {longest} tokens; this server allows {limit}"
        raise ApiError(400, message, body.prompt_field, "context_length_exceeded")
    if longest + max_tokens > service.context:
        message = (
            f"this model's maximum context length is {service.context} tokens, but a prompt has {longest} and "
            f"{body.limit_field} is {max_tokens}; shorten the prompt or lower {body.limit_field}"
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
    plan: ReplyPlan,
) -> AsyncGenerator[list[Piece], None]:
    """Yields an empty list once the engine has accepted the prompts, then what each step adds to the choices."""
    stop_ids = set(params.ending_ids(service.engine.model.config.eos_token_ids))
    stop = [StopString(text) for text in params.stop]
    choices = []
    for prompt in prompts:
        context = decoding_context(service.tokenizer, prompt)
        for _ in range(params.n):
            decoder = StreamDecoder(service.tokenizer, context)
            text = GrowingText(decoder, stop, stop_ids, ReplyReader(plan.form, decoder, prompt))
            choices.append(_Choice(text, plan))
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
        record.aborted = {
            "engine_failed": "failure",
            "not_finite": "failure",
            "grammar_failed": "failure",
            "shutting_down": "shutdown",
        }.get(error.code or "")
        raise


class _Choice:
    """A sample in progress."""

    def __init__(self, text: GrowingText, plan: ReplyPlan):
        self.text, self.plan = text, plan
        self.tokens = 0
        self.first_token = 0.0
        self.call_ids: dict[int, str] = {}

    def calls(self) -> list[CallPiece]:
        """The parts of calls that the last token has completed."""
        pieces = []
        for part in self.text.calls:
            if part.call == 0 or (part.call > 0 and self.plan.parallel):
                new = part.call not in self.call_ids
                call_id = self.call_ids.setdefault(part.call, self.plan.call_id() if new else "")
                pieces.append(CallPiece(part.call, call_id, part.name, part.arguments))
        return pieces

    def whole(self, parts: ReplyParts) -> tuple[str, list[CallPiece]]:
        """The content of a finished reply and its calls. The text of a call that cannot be parsed is content."""
        written = [each for each in parts.written if not each.call.problem]
        unread = [each.text for each in parts.written if each.call.problem and each.text]
        content = "\n".join([parts.content, *unread] if parts.content else unread)
        calls = written if self.plan.parallel else written[:1]
        return content, [
            CallPiece(number, self.call_ids.get(number) or self.plan.call_id(), each.call.name, each.arguments)
            for number, each in enumerate(calls)
        ]


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
    reason: str | None = "stop" if last and choice.text.stopped else event.finish_reason
    # Not for completions, which may continue a begun sample.
    parts = choice.text.parts() if last and choice.plan.form is not PLAIN else None
    calls = choice.calls()
    if reason == "stop" and choice.call_ids:
        reason = "tool_calls"
    reasoning, whole = choice.text.reasoning, None
    if parts is not None:
        whole = Whole(parts.reasoning, *choice.whole(parts))
    section: Section = "content" if text else "reasoning" if reasoning else "call" if calls else "structure"
    return Piece(
        index,
        position,
        choice.tokens == 1,
        text,
        [event],
        [offset],
        [section],
        reason,
        choice.text.stop_string,
        reasoning,
        whole,
        calls,
    )


async def _whole(
    service: Service,
    reply: ReplyWriter,
    record: RequestRecord,
    steps: AsyncGenerator[list[Piece], None],
    params: SamplingParams,
    n: int,
) -> Response:
    """n: how many of each prompt's samples the response has."""
    choices: dict[int, Piece] = {}
    async with aclosing(steps):
        async for pieces in steps:
            for piece in pieces:
                if piece.first:
                    choices[piece.index] = piece
                else:
                    choices[piece.index].add(piece)
    ordered = [choices[index] for index in sorted(choices)]
    if params.n > n:
        ordered = best_of(ordered, params.n, n)
    for piece in ordered:
        piece.complete()
    usage = usage_of(record.prompt_tokens, record.completion_tokens)
    # Many long samples, or long prompts, have hundreds of thousands of log-probabilities.
    written = record.completion_tokens + (0 if params.prompt_logprobs is None else record.prompt_tokens)
    in_thread = service.in_turn if written > LONG_ANSWER else asyncio.to_thread
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
            if text := "".join(events):
                yield text
    yield reply.end(usage_of(record.prompt_tokens, record.completion_tokens))
