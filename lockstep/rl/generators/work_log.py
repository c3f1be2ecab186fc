"""What the generators did, as metrics per step and as a timeline."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from lockstep.rl.generators.remote import Request

SPANS = 5_000
"""Most spans per generator in the timeline; the oldest are dropped."""
FIRST_PROCESS = 1000
"""Process number of the first generator in the timeline; ranks have lower ones."""
KINDS = {"sampling_seconds": "sample", "weights_seconds": "take weights"}
Span = tuple[float, float, str]
"""Start, end, and activity."""
LEFT = "left"
"""Activity of a zero-length span that marks a generator's end; the time after it is not idle time."""
IDLE_SECONDS = 0.02
"""A shorter gap is the time between two messages, not idle time."""


def engine_metrics(new: Mapping[str, float], elapsed: float) -> dict[str, float]:
    """Metrics of an engine whose `Statistics` have grown by `new` in `elapsed` seconds.

    `busy`: fraction of the time spent sampling. `tokens_per_second`: per second spent sampling. `packing_seconds`: of
    these, spent packing or quantizing weights that had changed.
    `prompt_tokens`: computed; `prompt_tokens_reused`: cache hits. `seconds_saved`: by drafts.
    `queue_seconds`, `prefill_seconds`, `decode_seconds`, `token_seconds`: means over finished samples, if there are
    any.
    """
    seconds, ended = new["sampling_seconds"], new["samples_ended"]
    metrics = {
        "busy": min(1.0, seconds / elapsed),
        "tokens_per_second": new["tokens_sampled"] / seconds if seconds else 0.0,
        "packing_seconds": new["packing_seconds"],
        "prompt_tokens": new["prompt_tokens_computed"],
        "prompt_tokens_reused": new["prompt_tokens_reused"],
        "preemptions": new["preemptions"],
        "tokens_guessed": new["tokens_guessed"],
        "guesses_accepted": new["guesses_accepted"],
        "mean_accepted_run": new["guesses_accepted"] / max(1, new["runs_guessed"]),
        "seconds_saved": new["unguessed_seconds"] - new["guessed_seconds"],
    }
    if ended:
        metrics |= {name: new[name] / ended for name in ("queue_seconds", "prefill_seconds", "decode_seconds")}
        metrics["token_seconds"] = new["decode_seconds"] / max(1, new["tokens_decoded"])
    return metrics


class WorkLog:
    """The generators' activity, on this process's clock, as clocks of different hosts disagree."""

    def __init__(self) -> None:
        self._at_last_metrics: dict[str, Mapping[str, float]] = {}
        """Each generator's statistics when metrics were last computed."""
        self._latest: dict[str, Mapping[str, float]] = {}
        self._waits: dict[str, list[tuple[float, ...]]] = defaultdict(list)
        """Of finished requests, in seconds: from the request until it was sent; from the request to its first token;
        from that to its last token; between tokens."""
        self._spans: dict[str, deque[Span]] = defaultdict(lambda: deque(maxlen=SPANS))
        self._last_metrics = time.monotonic()

    def update(self, name: str, reported: Mapping[str, float]) -> None:
        """Records the statistics that a generator reports."""
        before, now = self._latest.get(name, {}), time.time()
        for key, activity in KINDS.items():
            seconds = reported.get(key, 0.0) - before.get(key, 0.0)
            if seconds > 0:
                self._note(name, (now - seconds, now, activity))
        self._latest[name] = reported

    def record_request(self, name: str, request: Request) -> None:
        """Records the latencies of a finished request."""
        longest, now = max(sample.sampled for sample in request.samples), time.monotonic()
        decode = now - request.first_token_at
        asked = request.created_at
        self._waits[name].append(
            (request.sent_at - asked, request.first_token_at - asked, decode, decode / max(1, longest - 1))
        )
        if not self._latest.get(name):  # a server does not report when it samples
            self._note(name, (time.time() - (now - request.sent_at), time.time(), "sample"))

    def record_end(self, name: str) -> None:
        """Records that a generator has left."""
        if name in self._latest:
            self._note(name, (time.time(), time.time(), LEFT))

    def _note(self, name: str, new: Span) -> None:
        """Adds a span, joined with earlier ones of the same activity that it (nearly) touches."""
        spans = self._spans[name]
        while spans and spans[-1][2] == new[2] != LEFT and new[0] - spans[-1][1] < IDLE_SECONDS:
            last = spans.pop()
            new = (min(last[0], new[0]), max(last[1], new[1]), new[2])
        spans.append(new)

    def metrics(self, totals: Mapping[str, Mapping[str, float]], unfinished: Mapping[str, int]) -> dict[str, float]:
        """Metrics of each generator since the last call.

        As `engine_metrics`, with the time in the trainer's queue included in `queue_seconds`. `first_token_seconds`:
        the median over finished requests, measured from the request. For a generator without statistics, only what the
        trainer measures. totals: its statistics, by name. unfinished: its number of unfinished samples, by name.
        """
        now = time.monotonic()
        elapsed, self._last_metrics = now - self._last_metrics, now
        all_metrics: dict[str, float] = {}
        for name, counts in totals.items():
            metrics: dict[str, float] = {"held": unfinished[name]}
            if waits := self._waits.pop(name, []):
                queue, first_token, decode, token = zip(*waits)
                metrics["first_token_seconds"] = statistics.median(first_token)
                metrics["decode_seconds"] = statistics.mean(decode)
                metrics["token_seconds"] = statistics.mean(token)
            if counts:
                new = self._new(name, counts)
                metrics |= engine_metrics(new, elapsed) | {"weights_seconds": new["weights_seconds"]}
                if waits and "queue_seconds" in metrics:
                    metrics["queue_seconds"] += statistics.mean(queue)
            all_metrics |= {f"generators/{name}/{key}": value for key, value in metrics.items()}
        return all_metrics

    def _new(self, name: str, counts: Mapping[str, float]) -> dict[str, float]:
        """The increase of `counts` since the last call."""
        before, self._at_last_metrics[name] = self._at_last_metrics.get(name, {}), counts
        new = {key: value - before.get(key, 0) for key, value in counts.items()}
        # Statistics of a restarted generator count from 0 again.
        return dict(counts) if any(value < 0 for value in new.values()) else new

    def events(self) -> list[dict[str, Any]]:
        """Chrome trace events: each generator is a process, and gaps are idle time."""
        events = []
        for process, (name, spans) in enumerate(sorted(self._spans.items()), FIRST_PROCESS):
            events.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}})
            events += [
                {"ph": "X", "pid": process, "tid": 0, "name": activity, "ts": began * 1e6, "dur": (ended - began) * 1e6}
                for began, ended, activity in _with_idle(sorted(spans))
            ]
        return events


def _with_idle(spans: list[Span]) -> Iterator[Span]:
    """A generator's spans, and idle ones in the gaps while it was present."""
    now = time.time()
    for span, (following, *_) in pairwise([*spans, (now, now, LEFT)]):
        if span[2] != LEFT:
            yield span
            if following - span[1] >= IDLE_SECONDS:
                yield span[1], following, "idle"
