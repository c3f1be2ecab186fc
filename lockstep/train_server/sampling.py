"""From a request for samples to the engine, and from its events to the client's protobuf answer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.generate.engine import Engine
from lockstep.generate.sampling_params import PromptScores, SamplingParams, TokenEvent
from lockstep.model.adapted_rows import AdaptedRows, adapted
from lockstep.train_server.batches import Datum, log_probs_of, micro_batches
from lockstep.train_server.losses import LOSSES
from lockstep.train_server.promises import Result, message
from lockstep.train_server.protocol import PlainTensor, Sample, Sampling
from lockstep.train_server.service import Sampler, Service
from lockstep.train_server.wire import FLOAT32, INT32, LENGTH, MESSAGES, STOP, numbers

NO_LOGPROB = -99999.0
"""What the client takes for a place without a likeliest token."""


def params_of(body: Sample, adapter: str, room: int) -> SamplingParams:
    """The engine's parameters; `room`: tokens that the context has left. Raises UserError for what is not supported."""
    if body.prompt_alt_tokens_k:
        raise UserError("prompt_alt_tokens_k is not supported; leave it out")
    given: Sampling = body.sampling_params
    stops = [given.stop] if isinstance(given.stop, str) else given.stop
    texts = tuple(each for each in stops or () if isinstance(each, str))
    scored = body.prompt_logprobs or body.topk_prompt_logprobs
    return SamplingParams(
        max_tokens=room if given.max_tokens is None else given.max_tokens,
        temperature=given.temperature,
        top_k=max(given.top_k, 0),
        top_p=given.top_p,
        n=body.num_samples,
        seed=given.seed,
        stop=texts,
        stop_token_ids=tuple(each for each in stops or () if isinstance(each, int)),
        ignore_eos=stops == [],
        top_logprobs=body.topk_sample_logprobs,
        prompt_logprobs=body.topk_prompt_logprobs if scored else None,
        adapter=adapter,
    )


async def sample(service: Service, sampler: Sampler, body: Sample) -> Result:
    """Samples, and encodes the answer. Raises UserError for what cannot be computed, ApiError if the engine fails."""
    prompt = body.prompt.token_ids()
    params = params_of(body, sampler.adapter, max(service.engine.max_positions - len(prompt), 1))
    samples: list[list[TokenEvent]] = [[] for _ in range(params.n)]
    with service.limits.places(params.n):
        async with service.engine_loop.generation([prompt], params) as generation:
            async for batch in generation.events():
                for _, event in batch:
                    samples[event.index].append(event)
    answer = MESSAGES["SampleResponse"]()
    for events in samples:
        answer.sequences.append(_sequence(events, body.topk_sample_logprobs))
    scores = samples[0][0].prompt_scores
    if scores is not None:
        _add_scores(answer, scores, body)
    if body.target_prompt_logprobs is not None:
        asked = targets_of(body.target_prompt_logprobs, len(prompt))
        found = await service.in_engine(lambda engine: _of_targets(engine, sampler.adapter, prompt, asked))
        answer.target_prompt_logprobs.dense = numbers(found.numpy(), FLOAT32)
        answer.target_prompt_logprobs.dtype = FLOAT32
        answer.target_prompt_logprobs.shape.extend(found.shape)
    return message(answer)


def _sequence(events: Sequence[TokenEvent], top: int) -> object:
    sequence = MESSAGES["SampledSequence"](
        stop_reason=STOP if events[-1].finish_reason == "stop" else LENGTH,
        tokens=numbers([event.token_id for event in events], INT32),
        logprobs=numbers([event.logprob for event in events], FLOAT32),
    )
    if top:
        sequence.topk_sampled_logprobs.CopyFrom(_likeliest([event.top_logprobs for event in events], top))
    return sequence


def _likeliest(rows: Sequence[Sequence[tuple[int, float]]], top: int) -> object:
    filled = [[*row[:top], *[(0, NO_LOGPROB)] * (top - len(row))] for row in rows]
    tokens, log_probs = ([[pair[side] for pair in row] for row in filled] for side in (0, 1))
    return MESSAGES["TopkLogprobs"](
        token_ids=numbers(tokens, INT32), logprobs=numbers(log_probs, FLOAT32), k=top, length=len(rows)
    )


def _add_scores(answer: object, scores: PromptScores, body: Sample) -> None:
    """The prompt's scores: nothing for its first token, and for those before the last ones that are asked for."""
    length = len(scores.tokens)
    first = 1 if body.prompt_logprobs_last_n is None else max(1, length - body.prompt_logprobs_last_n)
    log_probs = [math.nan] * first + scores.logprobs[first - 1 :]
    tops: list[list[tuple[int, float]]] = [[] for _ in range(first)] + scores.top_logprobs[first - 1 :]
    if body.prompt_logprobs:
        answer.prompt_logprobs = numbers(log_probs, FLOAT32)  # type: ignore[attr-defined]
    if body.topk_prompt_logprobs:
        answer.topk_prompt_logprobs.CopyFrom(_likeliest(tops, body.topk_prompt_logprobs))  # type: ignore[attr-defined]


def targets_of(asked: PlainTensor, length: int) -> Tensor:
    """The tokens to score in place of each of a prompt's from the second on; −1: none. Raises UserError."""
    shape = asked.shape or []
    if asked.sparse_crow_indices is not None or asked.sparse_col_indices is not None:
        raise UserError("target_prompt_logprobs is sparse; send it dense, with -1 where nothing is asked for")
    if (
        length < 2
        or len(shape) != 2
        or shape[0] != length - 1
        or shape[1] < 1
        or len(asked.data) != shape[0] * shape[1]
    ):
        raise UserError(
            f"target_prompt_logprobs has the shape {shape} and {len(asked.data)} numbers; for a prompt of {length} "
            f"tokens it must be [{length - 1}, K]"
        )
    return torch.tensor(asked.data).view(shape)


def _of_targets(engine: Engine, adapter: str, prompt: list[int], asked: Tensor) -> Tensor:
    """The trainer's log-probabilities of these tokens; 0 where none is asked for."""
    if int(asked.max()) >= engine.model.config.vocab_size or int(asked.min()) < -1:
        raise UserError("target_prompt_logprobs has a token outside of the vocabulary")
    (batch,) = micro_batches([Datum(prompt[:-1], asked.clamp(min=0), {})], LOSSES["cross_entropy"], 1)
    rows = [AdaptedRows(engine.adapters[adapter])] if adapter else []
    with torch.no_grad(), adapted(rows):
        found = log_probs_of(engine.model, batch).view(asked.shape)
    return found.masked_fill(asked < 0, 0.0)
