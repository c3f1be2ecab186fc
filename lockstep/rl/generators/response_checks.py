"""Checks of what generators report, so that a wrong one is dropped and not trained on.

Generators are authenticated and trusted, but may be faulty or misconfigured. The parity check of every step compares
log-probabilities with the trainer's; here every token must have one, so that none escapes it.
"""

from __future__ import annotations

from collections.abc import Collection

from lockstep.rl.generators.remote import InvalidResponse, RemoteSample, Request

ROUNDING = 1e-3
"""How far log-probabilities may exceed 0: ours never do, but other kernels sum exponentials in another order."""
LOWEST = -3.4e38
"""The lowest float32."""


def check_sample(
    request: Request,
    index: int,
    new: RemoteSample,
    versions: Collection[int],
    vocab_size: int,
    eos_token_ids: Collection[int],
) -> None:
    """Raises InvalidResponse if `new` cannot continue sample `index` of `request`.

    versions: the weights versions that the run has published. eos_token_ids: the model's.
    """
    if not 0 <= index < len(request.samples):
        raise InvalidResponse(f"sample {index} of a request for {len(request.samples)} samples")
    _check_counts(new, request.params.truncates)
    for token in new.token_ids:
        if not 0 <= token < vocab_size:
            raise InvalidResponse(f"token {token} outside a vocabulary of {vocab_size}")
    for logprob in (*new.logprobs, *new.truncated_logprobs):
        if not LOWEST <= logprob <= ROUNDING:
            raise InvalidResponse(f"log-probability {logprob}")
    for version in new.versions:
        if version not in versions:
            raise InvalidResponse(f"a token from weights version {version}, which the run has not published")
        if version < request.sent_version:
            raise InvalidResponse(
                f"a token from weights version {version}, but the request was sent at version {request.sent_version}"
            )
    _check_end(request, request.samples[index], new, request.params.ending_ids(eos_token_ids))


def _check_counts(new: RemoteSample, truncates: bool) -> None:
    count = len(new.token_ids)
    for label, values, is_required in (
        ("log-probabilities", new.logprobs, True),
        ("truncated log-probabilities", new.truncated_logprobs, truncates),
        ("versions", new.versions, True),
        ("routes", new.routes, bool(new.routes)),
    ):
        if len(values) != (count if is_required else 0):
            raise InvalidResponse(f"{len(values)} {label} for {count} tokens")


def _check_end(request: Request, sample: RemoteSample, new: RemoteSample, ending: Collection[int]) -> None:
    """A sample must end at its end token or its last one: otherwise another generator would continue past its end, or
    wait for an end that never comes. A stop string does not show in the tokens."""
    count, most, reason = sample.sampled + len(new.token_ids), request.params.max_tokens, new.finish_reason
    if sample.finish_reason is not None:
        raise InvalidResponse("tokens for a sample that is already finished")
    if reason not in (None, "stop", "length", "error"):
        raise InvalidResponse(f"finish_reason {reason!r}")
    if count > most:
        raise InvalidResponse(f"{count} tokens, but at most {most} were requested")
    if reason in ("stop", "length") and not count:
        raise InvalidResponse("a finished sample without any token")
    if reason == "length" and count < most:
        raise InvalidResponse(f"finish_reason 'length' after {count} of {most} tokens")
    if early := [token for token in new.token_ids[:-1] if token in ending]:
        raise InvalidResponse(f"tokens after {early[0]}, which ends a sample")
    if reason is None and new.token_ids and (new.token_ids[-1] in ending or count == most):
        raise InvalidResponse("the last token of a sample without a finish_reason")
