"""One sample of a request, from waiting to finished."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lockstep.generate.pages import ROOT
from lockstep.generate.sampling_params import Completion, FinishReason, PromptScores, SamplingParams
from lockstep.ops import NO_STATE

if TYPE_CHECKING:
    from lockstep.data import StreamDecoder
    from lockstep.generate.adapters import LoadedAdapter
    from lockstep.generate.adjustments import Adjustment


@dataclass(eq=False)
class Sequence:
    """The tokens of a sample, and the cache pages of those that are computed."""

    request_id: int
    index: int
    params: SamplingParams
    seed: int
    tokens: list[int]
    """Prompt and sampled tokens; the token after the last one is sampled next."""
    prompt_length: int
    stop_ids: frozenset[int]
    decoder: StreamDecoder | None = None
    """Only if there are stop strings to look for."""
    adjustment: Adjustment | None = None
    """Only if `params.adjusts`."""
    prompt_scores: PromptScores | None = None
    """Only if `params` requests them; of all samples of the request."""
    adapter: LoadedAdapter | None = None
    """Only if `params.adapter` names one."""
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    truncated_logprobs: list[float] = field(default_factory=list)
    """Under the truncated distribution; empty unless `params.truncates`."""
    routes: list[str] = field(default_factory=list)
    """The route of each sampled token, if `params` requests them and the model has experts; else empty."""
    finish_reason: FinishReason | None = None

    computed: int = 0
    """Tokens whose keys are in the cache once the steps scheduled so far have run."""
    pages: list[int] = field(default_factory=list)
    chain: int = ROOT
    """Identifies the contents of the full pages so far."""
    registered_pages: int = 0
    state: int = NO_STATE
    """The entry at the last boundary (`ops.DeltaCache`) up to `computed`, if the model has delta networks."""
    boundary_chain: int = ROOT
    """As `chain`, but of the full pages up to the last boundary."""
    branch: int = 0
    """A boundary whose state is kept, since another sequence parts from this one's tokens after it; 0: none."""
    branch_chain: int = ROOT
    """The chain of the pages up to it."""
    slot: int = -1
    """Row of the engine's arrays while it runs; -1: none."""

    requested_at: float = 0.0
    """By time.perf_counter, as the following times."""
    started_at: float = 0.0
    """Start of the first step that computed a part of it; 0: none yet."""
    first_token_at: float = 0.0
    """When this engine sampled its first token of the sequence; 0: not yet."""
    sampled_before: int = 0
    """Tokens that another engine had sampled before."""

    @property
    def root(self) -> int:
        """The chain without a full page."""
        return self.adapter.root if self.adapter else ROOT

    @property
    def sampled(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def grammar_seconds(self) -> float:
        """Processor time of its grammar so far, in this process; 0 once it has ended."""
        matcher = self.adjustment.matcher if self.adjustment and self.finish_reason is None else None
        return matcher.seconds if matcher else 0.0

    @property
    def shareable(self) -> int:
        """How many of its first tokens need not be computed, if their keys are in the cache."""
        scores = self.prompt_scores
        return len(self.tokens) - 1 if scores is None or scores.complete else len(scores.logprobs)

    def resume(self, begun: Completion) -> None:
        """Appends the tokens that another engine has sampled."""
        truncated = begun.truncated_logprobs or begun.logprobs
        routes = begun.routes or [""] * len(begun.token_ids)
        for sampled in zip(begun.token_ids, begun.logprobs, truncated, routes, strict=True):
            self.append(*sampled)
        if begun.finish_reason != "abort":
            self.finish_reason = begun.finish_reason

    def append(self, token: int, logprob: float, truncated_logprob: float, route: str = "") -> None:
        """Appends a sampled token and checks whether it is the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.params.truncates:
            self.truncated_logprobs.append(truncated_logprob)
        if self.params.routes:
            self.routes.append(route)
        if token in self.stop_ids or (self.decoder and self._completes_stop_string(token, self.decoder)):
            self.finish_reason = "stop"
        elif self.sampled >= self.params.max_tokens:
            self.finish_reason = "length"
        if self.adjustment:
            self.adjustment.accept(token, self.finish_reason is not None)

    def _completes_stop_string(self, token: int, decoder: StreamDecoder) -> bool:
        new = decoder.push(token)
        # A stop string that ends in the new text begins at most its length before the new text.
        tail = self.text[-max(map(len, self.params.stop)) :] + new
        self.text = tail
        return any(stop in tail for stop in self.params.stop)

    def completion(self) -> Completion:
        sampled = self.tokens[self.prompt_length :]
        routes = self.routes if any(self.routes) else []
        return Completion(sampled, self.logprobs, self.finish_reason or "abort", self.truncated_logprobs, routes=routes)
