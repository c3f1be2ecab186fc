"""Prometheus metrics: the engine's state, and counts and times of requests."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lockstep.generate.engine import Engine

FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120)
PER_TOKEN_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)


class EngineCollector(Collector):
    """Reads the engine when scraped, without a lock: each metric is a single number."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine, done = self._engine, self._engine.statistics
        pages = engine.allocator.num_pages
        prompt_tokens = done.prompt_tokens_computed + done.prompt_tokens_reused
        gauges = [
            ("sequences_running", "Sequences in the engine's batch.", len(engine.scheduler.running)),
            ("sequences_waiting", "Sequences waiting for a slot or for cache pages.", len(engine.scheduler.waiting)),
            ("cache_pages_total", "Pages of the key-value cache.", pages),
            ("cache_pages_used", "Pages in use by sequences.", pages - engine.allocator.num_free),
            (
                "prefix_hit_rate",
                "Share of all prompt tokens that were in the cache.",
                done.prompt_tokens_reused / max(1, prompt_tokens),
            ),
            ("weights_version", "Version of the weights in use.", engine.weights_version),
        ]
        counters = [
            ("prompt_tokens_computed", "Prompt tokens that went through the model.", done.prompt_tokens_computed),
            ("prompt_tokens_reused", "Prompt tokens that were in the cache.", done.prompt_tokens_reused),
            ("tokens_sampled", "Tokens sampled.", done.tokens_sampled),
            ("tokens_guessed", "Tokens that a draft proposed.", done.tokens_guessed),
            ("guesses_accepted", "Draft tokens that were accepted.", done.guesses_accepted),
            ("runs_guessed", "Drafts of one or more tokens, at most one per sequence and step.", done.runs_guessed),
            ("guessed_seconds", "Seconds in decode steps with drafts, drafting included.", done.guessed_seconds),
            ("unguessed_seconds", "Seconds that their tokens would have taken one by one.", done.unguessed_seconds),
            ("preemptions", "Sequences whose pages were freed and recomputed.", done.preemptions),
            ("steps", "Forward passes.", done.steps),
        ]
        for name, help_text, value in gauges:
            yield GaugeMetricFamily(f"lockstep_{name}", help_text, value=value)
        for name, help_text, value in counters:
            yield CounterMetricFamily(f"lockstep_{name}", help_text, value=value)


class Metrics:
    """The application's registry."""

    def __init__(self, engine: Engine):
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(engine))
        self._requests = Counter(
            "lockstep_requests", "Requests by route and status.", ["route", "status"], registry=self._registry
        )
        self._aborted = Counter(
            "lockstep_requests_aborted", "Requests that ended early.", ["reason"], registry=self._registry
        )
        self._first_token = Histogram(
            "lockstep_time_to_first_token_seconds",
            "Time from a request's arrival to its first token.",
            buckets=FIRST_TOKEN_BUCKETS,
            registry=self._registry,
        )
        self._per_token = Histogram(
            "lockstep_time_per_output_token_seconds",
            "Time between the tokens of a sample, averaged over the sample.",
            buckets=PER_TOKEN_BUCKETS,
            registry=self._registry,
        )

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def sample_finished(self, seconds: float, tokens: int) -> None:
        """A sample of `tokens` tokens took `seconds` from its first to its last."""
        if tokens > 1:
            self._per_token.observe(seconds / (tokens - 1))

    def finished(self, route: str, status: int, aborted: str | None) -> None:
        self._requests.labels(route, str(status)).inc()
        if aborted is not None:
            self._aborted.labels(aborted).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)
