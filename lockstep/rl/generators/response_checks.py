"""Checks of responses before the run uses them; the same for generator processes and HTTP servers.

They reject data that no correct generator sends, whether by a fault or on purpose. The parity check at every step
compares log-probabilities with the trainer's; the check here is that every token has one, so that none escapes it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

from lockstep.errors import one_line
from lockstep.generate import Statistics
from lockstep.generate.routes import is_written
from lockstep.rl.generators.remote import RemoteSample, Request

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_ .:@-]{0,63}")
"""Of a generator; used in metrics, logs and file names."""
REASONS = (None, "stop", "length", "error")
FIELDS = {
    "token_ids": ("token ids", int),
    "logprobs": ("log-probabilities", float),
    "truncated_logprobs": ("truncated log-probabilities", float),
    "versions": ("versions", int),
    "routes": ("routes", str),
}
"""Fields of a sample with one value per token, their name in messages, and their type."""
OPTIONAL = ("truncated_logprobs", "routes")
"""Fields that are empty unless the request needs them."""
ROUNDING = 1e-3
"""How far log-probabilities may exceed 0: ours never do, but other kernels sum exponentials in another order."""
LOWEST = -3.4e38
"""The lowest float32."""
MOST_TENSOR = 1024
LARGEST_PID = 2**31
LARGEST_STATISTIC = 1e15
STATISTICS = (*(each.name for each in fields(Statistics)), "weights_seconds")
"""The keys of `Remote.statistics`."""


class InvalidResponse(Exception):
    """A generator sent invalid data. The message, one line, says which."""

    def __init__(self, message: str):
        super().__init__(one_line(message))


def checked_samples(
    parts: Sequence[tuple[int, int, RemoteSample]],
    requests: Mapping[int, Request],
    last_request: int,
    versions: Collection[int],
    vocab_size: int,
    eos_token_ids: Collection[int] = (),
) -> list[tuple[Request, int, RemoteSample]]:
    """Those of `parts` that belong to `requests`; the others are late, as their requests have ended.

    requests: those that the generator has, by number. last_request: the highest number so far. versions: the weights
    versions that the run has published. eos_token_ids: the model's. Raises InvalidResponse.
    """
    so_far: dict[tuple[int, int], tuple[int, bool]] = {}
    checked = []
    for number, index, new in parts:
        if not _is_int(number, 0, last_request):
            raise InvalidResponse(f"samples of request {number!r}, which does not exist")
        _check_values(new, versions, vocab_size)
        if (request := requests.get(number)) is None:
            continue
        if not _is_int(index, 0, len(request.samples) - 1):
            raise InvalidResponse(f"sample {index!r} of a request for {len(request.samples)} samples")
        sample = request.samples[index]
        before, ended = so_far.get((number, index), (len(sample.token_ids), sample.finish_reason is not None))
        if ended and (new.token_ids or new.finish_reason):
            raise InvalidResponse("tokens for a sample that is already finished")
        _check_for(request, before + len(new.token_ids), new)
        _check_end(request, before + len(new.token_ids), new, eos_token_ids)
        so_far[number, index] = before + len(new.token_ids), ended or new.finish_reason is not None
        checked.append((request, index, new))
    return checked


def sample_of(plain: Any) -> RemoteSample:
    """The new tokens of a sample, from JSON. Raises InvalidResponse."""
    if not isinstance(plain, dict) or plain.keys() != FIELDS.keys() | {"finish_reason"}:
        raise InvalidResponse("a sample with missing or unknown fields")
    tokens, reason = plain["token_ids"], plain["finish_reason"]
    for name, (label, kind) in FIELDS.items():
        values = plain[name]
        fits = isinstance(values, list) and isinstance(tokens, list)
        if not fits or (len(values) != len(tokens) and not (name in OPTIONAL and not values)):
            raise InvalidResponse(f"{_counted(values)} {label} for {_counted(tokens)} tokens")
        for value in values:
            if type(value) is not kind:
                raise InvalidResponse(f"{value!r} among {label}")
    if not (reason is None or isinstance(reason, str)) or reason not in REASONS:
        raise InvalidResponse(f"finish_reason {reason!r}")
    return RemoteSample(**plain)


def _check_values(new: RemoteSample, versions: Collection[int], vocab_size: int) -> None:
    """Checks that do not depend on the request."""
    for token in new.token_ids:
        if not 0 <= token < vocab_size:
            raise InvalidResponse(f"token {token} outside a vocabulary of {vocab_size}")
    for logprob in (*new.logprobs, *new.truncated_logprobs):
        if not LOWEST <= logprob <= ROUNDING:
            raise InvalidResponse(f"log-probability {logprob}")
    for route in new.routes:
        if route and not is_written(route):
            raise InvalidResponse(f"route {route!r:.80}")
    for version in new.versions:
        if version not in versions:
            raise InvalidResponse(f"a token from weights version {version}, which the run has not published")


def _check_for(request: Request, count: int, new: RemoteSample) -> None:
    """Checks that depend on the request; `count` is the sample's length with the new tokens."""
    most, reason = request.params.max_tokens, new.finish_reason
    if count > most:
        raise InvalidResponse(f"{count} tokens, but at most {most} were requested")
    if reason == "error":
        return
    if reason == "length" and count < most:
        raise InvalidResponse(f"finish_reason 'length' after {count} of {most} tokens")
    if reason and not count:
        raise InvalidResponse("a finished sample without any token")
    if new.token_ids and bool(new.truncated_logprobs) != request.params.truncates:
        raise InvalidResponse(
            f"{len(new.truncated_logprobs)} truncated log-probabilities for {len(new.token_ids)} tokens"
        )
    if new.versions and min(new.versions) < request.sent_version:
        raise InvalidResponse(
            f"a token from weights version {min(new.versions)}, but the request was sent at version "
            f"{request.sent_version}"
        )


def _check_end(request: Request, count: int, new: RemoteSample, eos_token_ids: Collection[int]) -> None:
    """Checks that a sample ends at its end token, as another generator would otherwise continue past it.

    A stop string does not show in the tokens.
    """
    if new.finish_reason == "error" or not new.token_ids:
        return
    ending = request.params.ending_ids(eos_token_ids)
    if early := [token for token in new.token_ids[:-1] if token in ending]:
        raise InvalidResponse(f"tokens after {early[0]}, which ends a sample")
    if new.finish_reason is None and new.token_ids[-1] in ending:
        raise InvalidResponse(f"token {new.token_ids[-1]}, which ends a sample, without a finish_reason")
    if new.finish_reason is None and count == request.params.max_tokens:
        raise InvalidResponse(f"all {count} requested tokens without a finish_reason")


def checked_version(version: Any, before: int, versions: Collection[int]) -> int:
    """The weights version that a generator reports, after `before`. Raises InvalidResponse."""
    if type(version) is not int or version not in versions or version < before:
        raise InvalidResponse(f"weights version {version!r}, which the run has not published")
    return version


def checked_statistics(statistics: Any) -> dict[str, float]:
    """`Remote.statistics`, from JSON. Raises InvalidResponse."""
    if not isinstance(statistics, dict):
        raise InvalidResponse("statistics that are not a dictionary")
    if not statistics:
        return {}
    for name in STATISTICS:
        value = statistics.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LARGEST_STATISTIC:
            raise InvalidResponse(f"{name} {value!r}")
    return {name: statistics[name] for name in STATISTICS}


def checked_hello(hello: Any) -> dict[str, Any]:
    """The first message of a generator, or of another of its ranks. Raises InvalidResponse."""
    if not isinstance(hello, dict):
        raise InvalidResponse("a hello that is not a dictionary")
    rules = {
        "pid": _is_int(hello.get("pid"), 0, LARGEST_PID),
        "place": _is_text(hello.get("place")),
        "host": _is_text(hello.get("host")),
    }
    if "generator" in hello:
        rules |= {"generator": _is_name(hello["generator"]), "rank": _is_int(hello.get("rank"), 1, MOST_TENSOR)}
    else:
        rules |= {
            "name": hello.get("name") == "" or _is_name(hello.get("name")),
            "tensor": _is_int(hello.get("tensor"), 1, MOST_TENSOR),
        }
    if wrong := [name for name, holds in rules.items() if not holds]:
        problem = f"{wrong[0]} {hello[wrong[0]]!r}" if wrong[0] in hello else f"no {wrong[0]}"
        raise InvalidResponse(f"a hello with {one_line(problem, 100)}")
    return hello


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and NAME.fullmatch(value) is not None


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= 300 and value.isprintable()


def _is_int(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _counted(values: Any) -> str:
    return str(len(values)) if isinstance(values, list) else "no list of"
