"""What generators have done, as metrics per step and as a timeline."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lockstep.rl.generators.remote import Request

SPANS = 20_000
"""Most spans kept for the timeline, over all generators."""
FIRST_PROCESS = 1000
"""First process number of generators in the timeline; ranks have lower ones."""
KINDS = {"sampling_seconds": "sample", "weights_seconds": "take weights"}
Stretch = tuple[float, float, str]
"""Start, end, and what it was."""
LEFT = "left"
"""A generator's end, as a span of zero length; time after it is not idle time."""
IDLE_SECONDS = 0.02
"""A shorter gap is the time between two messages, not idle time."""


def engine_metrics(new: Mapping[str, float], past: float) -> dict[str, float]:
    """What an engine did whose `Statistics` have grown by `new` in `past` seconds.

    `busy`: fraction of the time spent sampling. `tokens_per_second`: per second spent sampling.
    `prompt_tokens`: computed; `prompt_tokens_reused`: found in its cache. `seconds_saved`: by drafts.
    `queue_seconds`, `prefill_seconds`, `decode_seconds`, `token_seconds`: means over finished samples, if there are
    any.
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
    """From the request until a generator had room for it."""
    first_token: float
    """From the request to its first token."""
    decode: float
    """From its first token to its last."""
    token: float
    """Between tokens."""


class WorkLog:
    """Kept by the fleet, on this process's clock: the clocks of several hosts disagree."""

    def __init__(self) -> None:
        self._counted: dict[str, Mapping[str, float]] = {}
        """What each had done when metrics were last computed."""
        self._heard: dict[str, Mapping[str, float]] = {}
        self._waits: dict[str, list[Wait]] = defaultdict(list)
        """Of finished requests."""
        self._spans: deque[tuple[str, Stretch]] = deque(maxlen=SPANS)
        self._asked_at = time.monotonic()

    def heard(self, name: str, did: Mapping[str, float]) -> None:
        """Records what a generator reports to have done so far."""
        before, now = self._heard.get(name, {}), time.time()
        for key, span in KINDS.items():
            seconds = did.get(key, 0.0) - before.get(key, 0.0)
            if seconds > 0:
                self._note(name, (now - seconds, now, span))
        self._heard[name] = did

    def ended(self, name: str, request: Request) -> None:
        """Records how long a request took."""
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
        """Records that a generator is gone."""
        if name in self._heard:
            self._note(name, (time.time(), time.time(), LEFT))

    def _note(self, name: str, new: Stretch) -> None:
        """Adds a span, or extends the last one if they join."""
        if self._spans and self._spans[-1][0] == name and (both := _joined(self._spans[-1][1], new)):
            self._spans[-1] = name, both
        else:
            self._spans.append((name, new))

    def metrics(self, did: Mapping[str, Mapping[str, float]], held: Mapping[str, int]) -> dict[str, float]:
        """Metrics of each generator by name, since the last call. held: unfinished samples that each has.

        As `engine_metrics`, with the time until a generator got a request included in `queue_seconds`.
        `first_token_seconds`: the median over finished requests, measured from the request. For a generator that does
        not report what it did, only what the trainer sees.
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
                figures |= engine_metrics(new, past) | {"weights_seconds": new["weights_seconds"]}
            if waits and "queue_seconds" in figures:
                figures["queue_seconds"] += statistics.mean(wait.given for wait in waits)
            found |= {f"generators/{name}/{key}": value for key, value in figures.items()}
        return found

    def _new(self, name: str, counts: Mapping[str, float]) -> dict[str, float]:
        """The increase of `counts` since the last call."""
        before, self._counted[name] = self._counted.get(name, {}), counts
        new = {key: value - before.get(key, 0) for key, value in counts.items()}
        # One that was restarted counts from 0.
        return dict(counts) if any(value < 0 for value in new.values()) else new

    def events(self) -> list[dict[str, Any]]:
        """Chrome trace events, with each generator a process; adjacent spans are joined, and the gaps are idle."""
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
    """Both as one span, if they are of the same kind and overlap or (nearly) touch."""
    if one[2] != other[2] or other[0] - one[1] >= IDLE_SECONDS or one[2] == LEFT:
        return None
    return min(one[0], other[0]), max(one[1], other[1]), one[2]


def _with_idle(spans: Sequence[Stretch], now: float) -> list[Stretch]:
    """A generator's spans in order, joined where they touch, with the time between them as idle."""
    found: list[Stretch] = []
    there = False
    """Whether the generator has joined and not left."""
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
