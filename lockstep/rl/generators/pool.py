"""Remote generators behind the interface of one engine: each request goes to one, and to another if that one dies.

A request's samples depend only on its seed and the weights, not on the generator: one that continues where another
stopped draws the tokens that the other would have drawn.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lockstep.errors import RunStopped, UserError, one_line
from lockstep.generate import Completion, SamplingParams
from lockstep.generate.stragglers import stragglers
from lockstep.observe import log
from lockstep.rl.generators.remote import Remote, RemoteSample, Request
from lockstep.rl.generators.response_checks import checked_samples, checked_version
from lockstep.rl.generators.work_log import WorkLog
from lockstep.rl.weights.server import WeightManifest

POLL_SECONDS = 0.02
"""Longest wait of one `step`, in seconds."""


class GeneratorPool:
    """The separate generators of a run: a `Sampler`, and the `Reports` that its remotes call. Thread-safe."""

    def __init__(
        self,
        max_positions: int,
        cache_tokens: int,
        start_seconds: float,
        finish: bool = False,
        vocab_size: int = 2**31,
        eos_token_ids: Sequence[int] = (),
    ):
        """start_seconds: how long the pool may be without a ready generator. finish: whether requests are sampled from
        the weights that are newest when they are made, even if they start later. vocab_size, eos_token_ids: the
        model's."""
        self.max_positions, self.cache_tokens = max_positions, cache_tokens
        self._vocab_size, self._eos_token_ids = vocab_size, eos_token_ids
        self.start_seconds, self._finish = start_seconds, finish
        self.advice = "fix what prevents them from starting"
        """For the error if no generator has ever been ready: what to do."""
        self.required: set[str] = set()
        """Generators that the run started itself: if one is incompatible, the run ends."""
        self.banned: set[str] = set()
        """Generators that have sent invalid data: they get no more requests."""
        self.weights_version = 0
        self._manifest: WeightManifest | None = None
        self.changed = threading.Condition(threading.RLock())
        self._remotes: dict[str, Remote] = {}
        """By name; ready or still loading."""
        self._versions: dict[str, int] = {}
        """The weights version of each ready generator."""
        self._requests: dict[int, Request] = {}
        """The unfinished ones."""
        self._assigned: dict[int, str] = {}
        """The generator that each was sent to; none if it waits for capacity."""
        self._added: dict[int, Request] = {}
        """Those whose `samples` have not been fetched yet."""
        self._refused: dict[int, str] = {}
        self._next_id = 0
        self.num_reports = 0
        """Reports received from generators."""
        self._none_since = time.monotonic()
        self._was_ready = False
        """Whether any generator has ever been ready."""
        self._first_version = 0
        self._last_loss = ""
        self._failure: Exception | None = None
        self._cancelled: set[object] = set()
        """Owners whose requests have been cancelled."""
        self._work = WorkLog()

    # A Sampler. Finished requests are forgotten here; `CachingGeneratorPool` keeps them.

    def generate(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams],
        first: int | None = None,
    ) -> list[list[Completion]]:
        """As `Engine.generate`. Raises RunStopped if no generator is left, UserError if none has ever been ready."""
        return self.complete([self.begin(*each) for each in pair_up(prompts, params)], first)

    def begin(
        self, prompt: list[int], params: SamplingParams, begun: Sequence[Completion] = (), owner: object = None
    ) -> Request:
        """Requests a prompt's samples. begun: samples to continue. owner: as for `step`, `cancel`."""
        seed = secrets.randbits(62) if params.seed is None else params.seed
        samples = [RemoteSample.begun(completion) for completion in begun] or [RemoteSample() for _ in range(params.n)]
        with self.changed:
            request = Request(self._next_id, list(prompt), replace(params, seed=seed), samples, owner)
            self._next_id += 1
            if request.unfinished:
                self._requests[request.id] = request
                self._dispatch()
        return request

    def complete(
        self, requests: Sequence[Request], first: int | None = None, owner: object = None
    ) -> list[list[Completion]]:
        """Waits for all samples of the requests, or for the `first` requests, as `generate` does.

        Raises as `generate`, and aborts the requests then.
        """
        remaining = dict(enumerate(requests))
        try:
            with self.changed:
                while self._unfinished(remaining, first):
                    self._raise_failures([request.id for request in remaining.values()], owner)
                    self.changed.wait(POLL_SECONDS)
        finally:
            for request in requests:
                self.abort(request.id)
        for number, request in remaining.items():
            if any(sample.finish_reason == "error" for sample in request.samples):
                raise UserError(
                    f"prompt {number}: its logits are not finite (NaN or infinite) with weights version "
                    f"{self.weights_version}; check the weights, or load those of an earlier checkpoint"
                )
        return [
            [sample.completion() for sample in request.samples] if number in remaining else []
            for number, request in enumerate(requests)
        ]

    def _unfinished(self, remaining: dict[int, Request], first: int | None) -> bool:
        """Whether any is unfinished; aborts and removes those that are not among the `first`."""
        if first is not None:
            for number in stragglers({number: request.samples for number, request in remaining.items()}, first):
                self.abort(remaining.pop(number).id)
        return any(request.unfinished for request in remaining.values())

    def add(self, prompt: list[int], params: SamplingParams) -> int:
        with self.changed:
            request = self.begin(prompt, params)
            self._added[request.id] = request
            return request.id

    def samples(self, request_id: int) -> Sequence[RemoteSample]:
        """The samples of a request, which may be finished by now; can be called once."""
        return self._added.pop(request_id).samples

    def step(self, owner: object = None) -> None:
        """Waits briefly for reports. Raises as `generate`, and for refused requests of `owner`."""
        with self.changed:
            refused = [request for request in self._refused if self._requests[request].owner is owner]
            self._raise_failures(refused, owner)
            self.changed.wait(POLL_SECONDS)

    def abort(self, request_id: int) -> None:
        with self.changed:
            self._requests.pop(request_id, None)
            self._added.pop(request_id, None)
            self._refused.pop(request_id, None)
            if name := self._assigned.pop(request_id, None):
                self._remotes[name].abort(request_id)
            self._dispatch()

    def cancel(self, owner: object) -> None:
        """Raises RunStopped in every thread that waits for samples of this owner, now or later."""
        with self.changed:
            self._cancelled.add(owner)
            self.changed.notify_all()

    def _raise_failures(self, requests: Sequence[int], owner: object = None) -> None:
        if self._failure is not None:
            raise self._failure
        if owner in self._cancelled:
            raise RunStopped("the run ends", exit_code=1)
        for request in requests:
            if request in self._refused:
                raise UserError(self._refused[request])
        if not self._versions and time.monotonic() - self._none_since > self.start_seconds:
            raise self.no_generators_error(
                f"no generator has been ready for {self.start_seconds:g} s (actors.start_seconds){self._last_loss}"
            )

    def no_generators_error(self, problem: str) -> Exception:
        """The error for a run without generators: a UserError if none was ever ready, as with wrong settings."""
        if self._was_ready:
            return RunStopped(
                f"{problem}; their logs are in the run's folder, under logs/. --resume continues from the newest "
                "checkpoint",
                exit_code=1,
            )
        # A UserError leaves no folder of a new run, so this does not refer to its logs.
        return UserError(
            f"{problem}. None has been ready since the run started; {self.advice}, or raise actors.start_seconds, and "
            "start the run again"
        )

    # Membership and weights.

    def join(self, remote: Remote) -> None:
        """Adds a generator: it gets the newest weights, and requests once it has loaded them."""
        with self.changed:
            self._remotes[remote.name] = remote
            if self._manifest is not None:
                remote.load_weights(self._manifest)

    def leave(self, name: str) -> Remote | None:
        """Removes a generator, whose samples others continue; returns it, or None if it was not in the pool."""
        with self.changed:
            remote = self._remotes.pop(name, None)
            self._work.record_end(name)
            if self._versions.pop(name, None) is not None and not self._versions:
                self._none_since = time.monotonic()
            for request in [request for request, to in self._assigned.items() if to == name]:
                del self._assigned[request]
            self._dispatch()
            return remote

    def load_weights(self, manifest: WeightManifest) -> None:
        """All generators load these before any later request."""
        with self.changed:
            if self._finish:
                # Requests still waiting for capacity would otherwise be sampled from the new weights.
                self._dispatch(ignore_capacity=True)
            if self._manifest is None:
                self._first_version = manifest["version"]
            self._manifest, self.weights_version = manifest, manifest["version"]
            for remote in list(self._remotes.values()):
                remote.load_weights(manifest)

    def wait_for_weights(self, seconds: float = float("inf")) -> None:
        """Returns once a generator is ready and all ready ones have the newest weights. Raises as `step`."""
        until = time.monotonic() + seconds
        with self.changed:
            while not self._versions or any(version < self.weights_version for version in self._versions.values()):
                self._raise_failures([])
                if time.monotonic() > until:
                    return
                self.changed.wait(POLL_SECONDS)

    def fail(self, error: Exception) -> None:
        """Raises `error` in every thread that waits or makes a request, now or later."""
        with self.changed:
            self._failure = self._failure or error
            self.changed.notify_all()

    def metrics(self) -> dict[str, float]:
        """What each generator did since the last call, as `generators/NAME/…`."""
        with self.changed:
            unfinished = {name: self._unfinished_at(name) for name in self._versions}
            return self._work.metrics({name: self._remotes[name].statistics for name in unfinished}, unfinished)

    def trace_events(self) -> list[dict[str, Any]]:
        """When generators sampled, loaded weights and were idle, as Chrome trace events."""
        with self.changed:
            return self._work.events()

    @property
    def names(self) -> list[str]:
        """Names of all generators in the pool, ready or not."""
        with self.changed:
            return sorted(self._remotes)

    def remote(self, name: str) -> Remote | None:
        """The generator of this name, ready or not."""
        return self._remotes.get(name)

    @property
    def ready(self) -> list[str]:
        """Names of the generators that have weights."""
        with self.changed:
            return sorted(self._versions)

    def _dispatch(self, ignore_capacity: bool = False) -> None:
        """Sends waiting requests, in order of arrival, each to the generator with the fewest unfinished samples.

        ignore_capacity: even if all generators are full.
        """
        load = {name: self._unfinished_at(name) for name in self._versions}
        for request in self._requests.values():
            if request.id in self._assigned or not load or not request.unfinished:
                continue
            name = min(load, key=lambda candidate: (load[candidate], candidate))
            remote = self._remotes[name]
            if not ignore_capacity and load[name] and load[name] + request.unfinished > 2 * remote.capacity:
                return
            self._assigned[request.id], request.sent_version = name, self._versions[name]
            request.sent_at = request.sent_at or time.monotonic()
            load[name] += request.unfinished
            remote.submit(request)

    def _unfinished_at(self, name: str) -> int:
        return sum(self._requests[request].unfinished for request, to in self._assigned.items() if to == name)

    # The `Reports` of its remotes.

    def sampled(self, remote: Remote, parts: Sequence[tuple[int, int, RemoteSample]]) -> None:
        with self.changed:
            self.num_reports += 1
            if self._remotes.get(remote.name) is not remote:
                return  # removed: others continue its samples
            requests = {number: self._requests[number] for number, to in self._assigned.items() if to == remote.name}
            checked = checked_samples(
                parts, requests, self._next_id - 1, self._published, self._vocab_size, self._eos_token_ids
            )
            self._work.update(remote.name, remote.statistics)
            for request, index, new in checked:
                request.first_token_at = request.first_token_at or time.monotonic()
                _extend(request.samples[index], new, bool(request.params.routes))
            for request_id in {part[0] for part in parts}:
                reported = self._requests.get(request_id)
                if reported and not reported.unfinished and self._assigned.get(request_id) == remote.name:
                    self._work.record_request(remote.name, reported)
                    del self._requests[request_id], self._assigned[request_id]
            self._dispatch()
            self.changed.notify_all()

    @property
    def _published(self) -> range:
        """The weights versions that have been published."""
        return range(self._first_version, self.weights_version + 1)

    def has_weights(self, remote: Remote, version: int) -> None:
        with self.changed:
            self.num_reports += 1
            if self._remotes.get(remote.name) is remote:
                before = self._versions.get(remote.name, 0)
                self._versions[remote.name] = checked_version(version, before, self._published)
                self._was_ready = True
                self._work.update(remote.name, remote.statistics)
                self._dispatch()
                self.changed.notify_all()

    def refused(self, remote: Remote, request_id: int, problem: str) -> None:
        with self.changed:
            if self._assigned.get(request_id) == remote.name and self._remotes.get(remote.name) is remote:
                self._refused[request_id] = one_line(problem, 1000)
                self.changed.notify_all()

    def incompatible(self, remote: Remote, problem: str) -> None:
        problem = one_line(problem, 1000)
        if remote.name in self.required:
            self.fail(UserError(f"{remote.name}: {problem}"))
        else:
            log.warning("%s cannot sample for this run: %s", remote.name, problem)

    def lost(self, remote: Remote, why: str, invalid: bool = False) -> None:
        with self.changed:
            if self._remotes.get(remote.name) is not remote:
                return
            if invalid:
                self.banned.add(remote.name)
            unfinished = self._unfinished_at(remote.name)
            self.leave(remote.name)
            others = f"{len(self._versions)} others continue" if self._versions else "the next one gets"
            reason = one_line(why)
            if invalid:
                reason = f"it sent invalid data ({reason}), and gets no more requests"
            self._last_loss = f"; the last one, {remote.name}: {reason}"
            log.warning("%s: %s; %s its %d unfinished samples", remote.name, reason, others, unfinished)
            self.changed.notify_all()


def pair_up(
    prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[tuple[list[int], SamplingParams]]:
    """Each prompt with its sampling parameters. Raises UserError if their numbers differ."""
    listed = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    if len(listed) != len(prompts):
        raise UserError(f"{len(prompts)} prompts but {len(listed)} sampling parameters; give one, or one per prompt")
    return list(zip(prompts, listed))


def _extend(sample: RemoteSample, new: RemoteSample, with_routes: bool) -> None:
    sample.token_ids += new.token_ids
    sample.logprobs += new.logprobs
    sample.truncated_logprobs += new.truncated_logprobs
    sample.versions += new.versions
    if with_routes:  # one per token, also from a generator that reports none
        sample.routes += new.routes or [""] * len(new.token_ids)
    sample.finish_reason = new.finish_reason
