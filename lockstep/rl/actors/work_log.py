"""What generators have done, in figures for a step and as a timeline."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lockstep.rl.actors.remote import Request

SPANS = 20_000
"""Kept for the timeline, of all generators."""
FIRST_PROCESS = 1000
"""Numbers of generators in the timeline; those of ranks are lower."""
KINDS = {"sampling_seconds": "sample", "weights_seconds": "take weights"}
Stretch = tuple[float, float, str]
"""When it began and ended, and what it was."""
LEFT = "left"
"""A generator's end, as a span of no length; what comes after it is no idle time."""
IDLE_SECONDS = 0.02
"""What is shorter is no idle time, but what passes between two messages."""


def figures_of(new: Mapping[str, float], past: float) -> dict[str, float]:
    """What an engine did whose `Statistics` have grown by `new` in `past` seconds.

    `busy`: share of the time in which it sampled. `tokens_per_second`: of the time in which it sampled.
    `prompt_tokens`: computed; `prompt_tokens_reused`: found in its cache. `seconds_saved`: by guesses.
    `queue_seconds`, `prefill_seconds`, `decode_seconds`, `token_seconds`: means over the samples that have ended,
    where any has.
    """
    seconds, ended = new["sampling_seconds"], new["samples_ended"]
    figures = {
        "busy": min(1.0, seconds / past),
        "tokens_per_second": new["tokens_sampled"] / seconds if seconds else 0.0,
        "prompt_tokens": new["prompt_tokens_computed"],
        "prompt_tokens_reused": new["prompt_tokens_reused"],
        "preemptions": new["preemptions"],
        "tokens_guessed": new["tokens_guessed"],
        "guesses_accepted": new["guesses_accepted"],
        "mean_accepted_run": new["guesses_accepted"] / max(1, new["runs_guessed"]),
        "seconds_saved": new["unguessed_seconds"] - new["guessed_seconds"],
    }
    if ended:
        figures |= {name: new[name] / ended for name in ("queue_seconds", "prefill_seconds", "decode_seconds")}
        figures["token_seconds"] = new["decode_seconds"] / max(1, new["tokens_decoded"])
    return figures


class Wait(NamedTuple):
    """Seconds of a request, as the trainer sees them."""

    given: float
    """From asking until a generator had room for it."""
    first_token: float
    """From asking."""
    decode: float
    """From there to its last."""
    token: float
    """From token to token."""


class WorkLog:
    """Kept by the fleet, by this process's clock: those of several hosts disagree."""

    def __init__(self) -> None:
        self._counted: dict[str, Mapping[str, float]] = {}
        """What each had done when metrics were last asked for."""
        self._heard: dict[str, Mapping[str, float]] = {}
        self._waits: dict[str, list[Wait]] = defaultdict(list)
        """Of the requests that have ended."""
        self._spans: deque[tuple[str, Stretch]] = deque(maxlen=SPANS)
        self._asked_at = time.monotonic()

    def heard(self, name: str, did: Mapping[str, float]) -> None:
        """Notes what a generator says that it has done by now."""
        before, now = self._heard.get(name, {}), time.time()
        for key, span in KINDS.items():
            seconds = did.get(key, 0.0) - before.get(key, 0.0)
            if seconds > 0:
                self._note(name, (now - seconds, now, span))
        self._heard[name] = did

    def ended(self, name: str, request: Request) -> None:
        """Notes how long a request took."""
        longest, now = max(len(sample.token_ids) for sample in request.samples), time.monotonic()
        decode = now - request.first_at
        self._waits[name].append(
            Wait(
                request.given_at - request.begun_at,
                request.first_at - request.begun_at,
                decode,
                decode / max(1, longest - 1),
            )
        )
        if not self._heard.get(name):  # a server does not say when it samples
            self._note(name, (time.time() - (now - request.given_at), time.time(), "sample"))

    def left(self, name: str) -> None:
        """Notes that a generator is gone."""
        if name in self._heard:
            self._note(name, (time.time(), time.time(), LEFT))

    def _note(self, name: str, new: Stretch) -> None:
        """Adds a span, or what it is longer than the last one where both are one."""
        if self._spans and self._spans[-1][0] == name and (both := _joined(self._spans[-1][1], new)):
            self._spans[-1] = name, both
        else:
            self._spans.append((name, new))

    def metrics(self, did: Mapping[str, Mapping[str, float]], held: Mapping[str, int]) -> dict[str, float]:
        """Of each generator by its name, since the last call. held: samples that each has been given and not ended.

        As `figures_of`, with the time until it was given a request in `queue_seconds`. `first_token_seconds`: the
        median over the requests that have ended, from asking on. Of one that does not say what it did there is what
        the trainer sees.
        """
        now = time.monotonic()
        past, self._asked_at = now - self._asked_at, now
        found: dict[str, float] = {}
        for name, counts in did.items():
            figures: dict[str, float] = {"held": held[name]}
            waits = self._waits.pop(name, [])
            if waits:
                figures["first_token_seconds"] = statistics.median(wait.first_token for wait in waits)
                figures["decode_seconds"] = statistics.mean(wait.decode for wait in waits)
                figures["token_seconds"] = statistics.mean(wait.token for wait in waits)
            if counts:
                new = self._new(name, counts)
                figures |= figures_of(new, past) | {"weights_seconds": new["weights_seconds"]}
            if waits and "queue_seconds" in figures:
                figures["queue_seconds"] += statistics.mean(wait.given for wait in waits)
            found |= {f"generators/{name}/{key}": value for key, value in figures.items()}
        return found

    def _new(self, name: str, counts: Mapping[str, float]) -> dict[str, float]:
        """What `counts` have grown by since the last call."""
        before, self._counted[name] = self._counted.get(name, {}), counts
        new = {key: value - before.get(key, 0) for key, value in counts.items()}
        # One that was started again counts from 0.
        return dict(counts) if any(value < 0 for value in new.values()) else new

    def events(self) -> list[dict[str, Any]]:
        """Chrome's trace events, each generator a process; what it did at once is one, and between them it was idle."""
        events = []
        for place, name in enumerate(sorted({name for name, _ in self._spans})):
            number = FIRST_PROCESS + place
            events.append({"ph": "M", "pid": number, "name": "process_name", "args": {"name": name}})
            own = sorted(stretch for each, stretch in self._spans if each == name)
            events += [
                {"ph": "X", "pid": number, "tid": 0, "name": span, "ts": began * 1e6, "dur": (ended - began) * 1e6}
                for began, ended, span in _with_idle(own, time.time())
            ]
        return events


def _joined(one: Stretch, other: Stretch) -> Stretch | None:
    """Both as one, where the other is the same and began before the one's end, or at once after it."""
    if one[2] != other[2] or other[0] - one[1] >= IDLE_SECONDS or one[2] == LEFT:
        return None
    return min(one[0], other[0]), max(one[1], other[1]), one[2]


def _with_idle(spans: Sequence[Stretch], now: float) -> list[Stretch]:
    """A generator's spans in their order, those that are one joined, and the time between them as idle."""
    found: list[Stretch] = []
    there = False
    """Whether it has come and not left."""
    for new in [*spans, (now, now, LEFT)]:
        if there and (both := _joined(found[-1], new)):
            found[-1] = both
            continue
        if there and new[0] - found[-1][1] >= IDLE_SECONDS:
            found.append((found[-1][1], new[0], "idle"))
        there = new[2] != LEFT
        if there:
            found.append(new)
    return found
