"""The parameters of a request, and its results."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

from lockstep.config.bounds import type_problem
from lockstep.errors import UserError

FinishReason = Literal["stop", "length", "abort", "error"]
RoutesForm = Literal["", "digest", "whole"]
MAX_TOP_LOGPROBS = 20
LARGEST_TOP_K = 2**31 - 1
"""Larger than any vocabulary, and fits in a tensor."""
KINDS = {
    "max_tokens": int, "temperature": float, "top_k": int, "top_p": float, "min_p": float, "n": int, "seed": int,
    "top_logprobs": int, "min_tokens": int, "frequency_penalty": float, "presence_penalty": float,
    "repetition_penalty": float, "prompt_logprobs": int,
}  # fmt: skip
MOST_SAMPLES = 2**16
"""Per prompt: every sample is allocated before the first one is computed."""


@dataclass(frozen=True)
class SamplingParams:
    """How a prompt is continued. Raises UserError, naming the field, for an invalid value."""

    max_tokens: int = 64
    """Maximum number of tokens to sample."""
    temperature: float = 1.0
    """0 selects the likeliest token; its log-probability is then reported at temperature 1."""
    top_k: int = 0
    """Draw only from the k likeliest tokens; 0: off."""
    top_p: float = 1.0
    """Draw from the smallest set of tokens with at least this total probability, among those top_k leaves; 1: off."""
    min_p: float = 0.0
    """Draw from tokens whose probability is at least this fraction of the likeliest token's; 0: off."""
    n: int = 1
    """Samples per prompt."""
    seed: int | None = None
    """Makes the draws reproducible, whatever else is in the batch; None: a fresh seed."""
    stop_token_ids: tuple[int, ...] = ()
    """Stop after any of these tokens, in addition to the model's end-of-text tokens."""
    stop: str | tuple[str, ...] = ()
    """Stop after the token that completes this string, or any of these; needs a tokenizer. Stored as a tuple."""
    ignore_eos: bool = False
    """Continue after an end-of-text token."""
    min_tokens: int = 0
    """Do not sample a token that ends the sample before this many tokens."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token and what is added to its logit."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a sampled token for each time that it was sampled."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each sampled token."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of the tokens of prompt and sample, and multiplies their negative ones (arXiv
    1909.05858)."""
    grammar: str = ""
    """The sample must follow this grammar: what `generate.grammars` makes of a JSON schema, a regular expression or a
    Lark grammar. Needs a tokenizer and llguidance."""
    adapter: str = ""
    """The name of the engine's adapter to sample with; empty: none."""
    top_logprobs: int = 0
    """Also report the log-probabilities of this many of the likeliest tokens at every position."""
    prompt_logprobs: int | None = None
    """Also report the log-probabilities of the prompt's tokens, at temperature 1, and of this many of the likeliest
    tokens in their places; None: not. Such a prompt is computed as a whole, whatever the prefix cache has of it."""
    routes: RoutesForm = ""
    """Also report the experts that computed each token, if the model has experts: all of them, or a digest."""

    def __post_init__(self) -> None:
        stops = (self.stop,) if isinstance(self.stop, str) or not isinstance(self.stop, Iterable) else tuple(self.stop)
        object.__setattr__(self, "stop", stops)
        self._check_types()
        limits = [
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", self.temperature == 0 or 0.01 <= self.temperature <= 100, "0, or from 0.01 to 100"),
            ("top_k", 0 <= self.top_k <= LARGEST_TOP_K, f"from 0 to {LARGEST_TOP_K}"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p < 1, "in [0, 1)"),
            ("n", 1 <= self.n <= MOST_SAMPLES, f"from 1 to {MOST_SAMPLES}"),
            ("routes", self.routes in get_args(RoutesForm), "digest, whole, or empty"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"from 0 to max_tokens, {self.max_tokens}"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "from -2 to 2"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "from -2 to 2"),
            ("repetition_penalty", 0 < self.repetition_penalty <= 100, "above 0, up to 100"),
            ("top_logprobs", 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS, f"from 0 to {MAX_TOP_LOGPROBS}"),
            ("prompt_logprobs", 0 <= (self.prompt_logprobs or 0) <= MAX_TOP_LOGPROBS, f"from 0 to {MAX_TOP_LOGPROBS}"),
            ("stop", all(stops), "of strings that are not empty"),
        ]
        for name, holds, rule in limits:
            if not holds:
                _refuse(f"{name} is {getattr(self, name)!r:.60}; it must be {rule}")

    def _check_types(self) -> None:
        for name, kind in KINDS.items():
            if name not in ("seed", "prompt_logprobs") or getattr(self, name) is not None:
                _refuse(type_problem(name, getattr(self, name), kind))
        ids = self.stop_token_ids
        if not isinstance(ids, Collection) or any(type_problem("", token, int) for token in ids):
            _refuse(f"stop_token_ids is {ids!r:.60}; it must be a tuple of whole numbers")
        pairs = self.logit_bias
        if not isinstance(pairs, Collection) or not all(map(_is_bias, pairs)):
            _refuse(f"logit_bias is {pairs!r:.60}; it must be pairs of a token and a number from -100 to 100")
        for name in ("grammar", "adapter"):
            _refuse(type_problem(name, getattr(self, name), str))
        if any(type_problem("", text, str) for text in self.stop):
            _refuse(f"stop is {self.stop!r:.60}; it must be a string, or a tuple of strings")

    @cached_property
    def truncates(self) -> bool:
        """Whether the draw is from another distribution than the model's at the sampling temperature."""
        return self.adjusts or (self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0))

    @cached_property
    def adjusts(self) -> bool:
        """Whether logits are changed before the draw (`generate.adjustments`)."""
        penalties = self.frequency_penalty != 0 or self.presence_penalty != 0 or self.repetition_penalty != 1
        return penalties or bool(self.logit_bias) or self.min_tokens > 0 or bool(self.grammar)

    def ending_ids(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        """The tokens after which a sample ends, for a model with these end-of-text tokens."""
        return frozenset(self.stop_token_ids).union(() if self.ignore_eos else eos_token_ids)


def _is_bias(pair: Any) -> bool:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        return False
    token, bias = pair
    return not type_problem("", token, int) and token >= 0 and not type_problem("", bias, float) and abs(bias) <= 100


def _refuse(problem: str) -> None:
    if problem:
        raise UserError(problem)


def sampling_params_of(plain: dict[str, Any]) -> SamplingParams:
    """The inverse of `dataclasses.asdict`, after JSON has made lists of its tuples."""
    return SamplingParams(**{name: _without_lists(value) for name, value in plain.items()})


def _without_lists(value: Any) -> Any:
    return tuple(map(_without_lists, value)) if isinstance(value, list) else value


@dataclass
class Completion:
    """One sample of a prompt."""

    token_ids: list[int]
    """The sampled tokens, including the one that ended the sample."""
    logprobs: list[float]
    """log p of each, at the sampling temperature, over the whole vocabulary: what `lockstep.score` returns."""
    finish_reason: FinishReason
    truncated_logprobs: list[float] = field(default_factory=list)
    """log p of each under the distribution that it was drawn from, with adjusted logits and among the tokens that
    grammar, top_k, top_p and min_p leave. Empty if the request has none of these."""
    versions: list[int] = field(default_factory=list)
    """The version of the weights that each was sampled from, if weights can change in between; else empty."""
    routes: list[str] = field(default_factory=list)
    """The experts that computed the log-probability of each, as `generate.routes` writes them, if requested and
    the model has experts; else empty."""


@dataclass(slots=True)
class PromptScores:
    """The log-probabilities of a prompt's tokens at temperature 1, over the whole vocabulary: what `lockstep.score`
    returns. All samples of a request share them."""

    tokens: list[int]
    """The prompt."""
    top: int
    """How many of the likeliest tokens are reported."""
    logprobs: list[float] = field(default_factory=list)
    """Of the prompt's tokens from the second on, as far as they are computed."""
    ranks: list[int] = field(default_factory=list)
    """How many tokens are as likely as each of these, or likelier: 1 for the likeliest."""
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    """In place of each of these, the likeliest tokens with their log-probabilities, best first."""

    @property
    def complete(self) -> bool:
        return len(self.logprobs) >= len(self.tokens) - 1

    def extend(self, first: int, scores: ListLike[tuple[float, int, list[tuple[int, float]]]]) -> None:
        """Appends logprob, rank and likeliest tokens of the tokens from `first` on, except for those that it has."""
        for logprob, rank, top in scores[len(self.logprobs) + 1 - first :]:
            self.logprobs.append(logprob)
            self.ranks.append(rank)
            self.top_logprobs.append(top)

    def clear(self) -> None:
        for values in (self.logprobs, self.ranks, self.top_logprobs):
            values.clear()


@dataclass(slots=True)
class TokenEvent:
    """A token that a step has sampled."""

    request_id: int
    index: int
    """Which of the request's n samples."""
    token_id: int
    logprob: float
    """At the sampling temperature, over the whole vocabulary."""
    finish_reason: FinishReason | None
    """`error`: the logits are not finite, or its grammar cannot be followed any more; the whole request has ended,
    token and log-probability are meaningless."""
    weights_version: int
    """The version of the weights that the token was sampled from."""
    top_logprobs: list[tuple[int, float]]
    """The likeliest tokens with their log-probabilities, best first, as many as requested."""
    truncated_logprob: float | None = None
    """Under the distribution that it was drawn from; None if that is the model's."""
    prompt_scores: PromptScores | None = None
    """Those of its prompt, all of them; None unless requested."""
    route: str = ""
    """The experts that computed `logprob`, as `generate.routes` writes them; empty unless requested."""
    problem: str = ""
    """Why the request ends with `error`, if not because its logits are not finite."""


def raise_broken(event: TokenEvent, request: str) -> None:
    """Raises UserError, naming the request, for an event that ends it because its logits are not finite."""
    if event.finish_reason == "error":
        if event.problem:
            raise UserError(f"{request}: {event.problem}")
        raise UserError(
            f"{request}: its logits are not finite (NaN or infinite) with weights version {event.weights_version}; "
            "check the weights, or load an earlier checkpoint"
        )
