"""Prompts in responses: their text (`echo`), and the log-probabilities of their tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lockstep.data import StreamDecoder, Tokenizer
from lockstep.generate.sampling_params import PromptScores
from lockstep.generate.server.api_error import ApiError

if TYPE_CHECKING:
    from lockstep.generate.server.protocol import SamplingRequest

MOST = 2**19
"""Log-probabilities of prompts in a response: some 40 MB."""


@dataclass
class Echo:
    """What a response repeats of its prompts."""

    texts: list[str]
    offsets: list[list[int]] = field(default_factory=list)
    """For each prompt, where in its text each token begins; empty without log-probabilities."""


def check_size(body: SamplingRequest, prompts: Sequence[Sequence[int]], copies: int) -> None:
    """copies: how often the response has each. Raises ApiError for too many log-probabilities."""
    if (top := body.top_of_prompt) is None:
        return
    count = sum(map(len, prompts)) * (top + 1) * copies
    if count > MOST:
        name = "echo" if body.prompt_logprobs is None else "prompt_logprobs"
        message = f"the response would have {count} log-probabilities of prompts, more than {MOST}; ask for fewer"
        raise ApiError(400, message, name)


def echo_of(tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], texts: Sequence[str] | None, offsets: bool) -> Echo:
    """texts: of the prompts, if they were given as texts. offsets: whether they are needed."""
    if texts is not None:
        spans = [tokenizer.encode_with_spans(text)[1] for text in texts] if offsets else []
        return Echo(list(texts), [[start for start, _ in each] for each in spans])
    if not offsets:
        return Echo([tokenizer.decode(prompt) for prompt in prompts])
    decoded = [_decoded(tokenizer, prompt) for prompt in prompts]
    return Echo([text for text, _ in decoded], [each for _, each in decoded])


def _decoded(tokenizer: Tokenizer, prompt: Sequence[int]) -> tuple[str, list[int]]:
    decoder, parts, length, offsets = StreamDecoder(tokenizer), [], 0, []
    for token in prompt:
        offsets.append(length)
        parts.append(decoder.push(token))
        length += len(parts[-1])
    return "".join((*parts, decoder.finish())), offsets


def prompt_logprobs(scores: PromptScores, top: int, entry: Callable[[int, float, int], Any]) -> str:
    """In vLLM's format, as JSON: for each token but the first, which nothing predicts, an object by token id of itself
    and the `top` likeliest. entry: of a token, its log-probability and its rank."""
    positions = ["null"]
    for token, logprob, rank, likeliest in zip(
        scores.tokens[1:], scores.logprobs, scores.ranks, scores.top_logprobs, strict=True
    ):
        ranked = {other: entry(other, value, place) for place, (other, value) in enumerate(likeliest[:top], 1)}
        positions.append(json.dumps({token: entry(token, logprob, rank)} | ranked))
    return f"[{', '.join(positions)}]"
