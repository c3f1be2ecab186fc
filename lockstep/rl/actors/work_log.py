"""What generators have done, in figures for a step and as a timeline."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

from lockstep.rl.actors.remote import Request

SPANS = 20_000
"""Kept for the timeline, of all generators."""
FIRST_PROCESS = 1000
"""Numbers of generators in the timeline; those of ranks are lower."""
KINDS = {"sampling_seconds": "sample", "weights_seconds": "take weights"}


class WorkLog:
    """Kept by the fleet, by this process's clock: those of several hosts disagree."""

    def __init__(self) -> None:
        self._counted: dict[str, Mapping[str, float]] = {}
        """What each had done when metrics were last asked for."""
        self._heard: dict[str, Mapping[str, float]] = {}
        self._waits: dict[str, list[tuple[float, float]]] = defaultdict(list)
        """Of each request that has ended: seconds to its first token, and from token to token."""
        self._spans: deque[tuple[str, str, float, float]] = deque(maxlen=SPANS)
        self._asked_at = time.monotonic()

    def heard(self, name: str, did: Mapping[str, float]) -> None:
        """Notes what a generator says that it has done by now."""
        before, now = self._heard.get(name, {}), time.time()
        for key, span in KINDS.items():
            seconds = did.get(key, 0.0) - before.get(key, 0.0)
            if seconds > 0:
                self._spans.append((name, span, now - seconds, seconds))
        self._heard[name] = did

    def ended(self, name: str, request: Request) -> None:
        """Notes how long a request took."""
        longest = max(len(sample.token_ids) for sample in request.samples)
        decoding = time.monotonic() - request.first_at
        self._waits[name].append((request.first_at - request.begun_at, decoding / max(1, longest - 1)))

    def metrics(self, did: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """Of each generator by its name, since the last call.

        `busy`: share of the time in which it sampled. `tokens_per_second`: of the time in which it sampled.
        `prompt_tokens`: computed; `prompt_tokens_reused`: found in its cache. `held`: samples that it holds now.
        `first_token_seconds`, `token_seconds`: medians over the requests that have ended, waiting for a place included.
        """
        now = time.monotonic()
        past, self._asked_at = now - self._asked_at, now
        found: dict[str, float] = {}
        for name, counts in did.items():
            before = self._counted.get(name, {})
            # One that was started again counts from 0.
            new = {key: value - before.get(key, 0) for key, value in counts.items()}
            if any(value < 0 for key, value in new.items() if key != "held"):
                new = dict(counts)
            self._counted[name] = counts
            if not counts:
                continue
            seconds = new["sampling_seconds"]
            figures = {
                "busy": min(1.0, seconds / past),
                "tokens_per_second": new["tokens_sampled"] / seconds if seconds else 0.0,
                "prompt_tokens": new["prompt_tokens_computed"],
                "prompt_tokens_reused": new["prompt_tokens_reused"],
                "preemptions": new["preemptions"],
                "tokens_guessed": new["tokens_guessed"],
                "guesses_accepted": new["guesses_accepted"],
                "held": counts["held"],
                "weights_seconds": new["weights_seconds"],
            }
            if waits := self._waits.pop(name, None):
                figures["first_token_seconds"] = statistics.median(first for first, _ in waits)
                figures["token_seconds"] = statistics.median(each for _, each in waits)
            found |= {f"generators/{name}/{key}": value for key, value in figures.items()}
        return found

    def events(self) -> list[dict[str, Any]]:
        """Chrome's trace events, each generator a process."""
        names = sorted({name for name, *_ in self._spans})
        numbers = {name: FIRST_PROCESS + place for place, name in enumerate(names)}
        titles = [{"ph": "M", "pid": numbers[name], "name": "process_name", "args": {"name": name}} for name in names]
        return titles + [
            {"ph": "X", "pid": numbers[name], "tid": 0, "name": span, "ts": began * 1e6, "dur": seconds * 1e6}
            for name, span, began, seconds in self._spans
        ]
