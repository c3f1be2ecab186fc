"""The separate generators of a run: each request goes to one of them, and to another if that one dies.

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
from lockstep.observe import log
from lockstep.rl.generators.remote import InvalidResponse, Remote, RemoteSample, Request
from lockstep.rl.generators.response_checks import check_sample
from lockstep.rl.generators.work_log import WorkLog
from lockstep.rl.weights.server import WeightManifest

POLL_SECONDS = 0.02
"""Longest wait of `GeneratorPool.wait`, in seconds."""


class GeneratorPool:
    """Distributes requests, and takes the reports of its remotes. `PoolSampler` is its users' side. Thread-safe."""

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
        self._start_seconds, self._finish = start_seconds, finish
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
        self._next_id = 0
        self.num_reports = 0
        """Reports received from generators."""
        self._none_since = time.monotonic()
        self._was_ready = False
        """Whether any generator has ever been ready."""
        self._first_version = 0
        self._last_loss = ""
        self._failure: Exception | None = None
        self._work = WorkLog()

    # For `PoolSampler`.

    def begin(
        self, prompt: list[int], params: SamplingParams, begun: Sequence[Completion] = (), owner: object = None
    ) -> Request:
        """Requests a prompt's samples. begun: samples to continue. owner: as for `wait`."""
        seed = secrets.randbits(62) if params.seed is None else params.seed
        samples = [RemoteSample.begun(completion) for completion in begun] or [RemoteSample() for _ in range(params.n)]
        with self.changed:
            request = Request(self._next_id, list(prompt), replace(params, seed=seed), samples, owner)
            self._next_id += 1
            if request.unfinished:
                self._requests[request.id] = request
                self._dispatch()
        return request

    def abort(self, request_id: int) -> None:
        with self.changed:
            request = self._requests.pop(request_id, None)
            if request and request.generator:
                self._remotes[request.generator].abort(request_id)
                self._dispatch()

    def wait(self, owner: object = None) -> None:
        """Waits briefly for samples to finish. Raises RunStopped if no generator is left, UserError if none has ever
        been ready, or if a request of `owner` cannot be computed."""
        with self.changed:
            if self._failure is not None:
                raise self._failure
            for request in self._requests.values():
                if request.owner is owner and request.refusal:
                    raise UserError(request.refusal)
            if not self._versions and time.monotonic() - self._none_since > self._start_seconds:
                seconds = f"{self._start_seconds:g} s (actors.start_seconds){self._last_loss}"
                raise self.no_generators_error(f"no generator has been ready for {seconds}")
            self.changed.wait(POLL_SECONDS)

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
            for request in self._requests_of(name):
                request.generator = ""
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

    def wait_for_weights(self) -> None:
        """Returns once a generator is ready and all ready ones have the newest weights. Raises as `wait`."""
        with self.changed:
            while not self._versions or any(version < self.weights_version for version in self._versions.values()):
                self.wait()

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
            if request.generator or not load:
                continue
            name = min(load, key=lambda candidate: (load[candidate], candidate))
            remote = self._remotes[name]
            if not ignore_capacity and load[name] and load[name] + request.unfinished > 2 * remote.capacity:
                return
            request.generator, request.sent_version = name, self._versions[name]
            request.sent_at = request.sent_at or time.monotonic()
            load[name] += request.unfinished
            remote.submit(request)

    def _requests_of(self, name: str) -> list[Request]:
        return [request for request in self._requests.values() if request.generator == name]

    def _unfinished_at(self, name: str) -> int:
        return sum(request.unfinished for request in self._requests_of(name))

    # Reports of its remotes, from any thread. They raise InvalidResponse; the remote then reports itself `lost`.

    def sampled(self, remote: Remote, parts: Sequence[tuple[int, int, RemoteSample]]) -> None:
        """New tokens: request, index of the sample, and what follows the tokens already reported."""
        with self.changed:
            self.num_reports += 1
            if self._remotes.get(remote.name) is not remote:
                return  # removed: others continue its samples
            self._work.update(remote.name, remote.statistics)
            for request_id, index, new in parts:
                request = self._requests.get(request_id)
                if request is None or request.generator != remote.name:
                    continue  # late: it has ended
                check_sample(request, index, new, self._published, self._vocab_size, self._eos_token_ids)
                request.first_token_at = request.first_token_at or time.monotonic()
                request.samples[index].extend(new, bool(request.params.routes))
                if not request.unfinished:
                    self._work.record_request(remote.name, request)
                    del self._requests[request_id]
                    self._dispatch()
            if any(new.finish_reason for _, _, new in parts):
                self.changed.notify_all()

    @property
    def _published(self) -> range:
        """The weights versions that have been published."""
        return range(self._first_version, self.weights_version + 1)

    def has_weights(self, remote: Remote, version: int) -> None:
        """From here on it samples with these weights; the first report means that it is ready."""
        with self.changed:
            self.num_reports += 1
            if self._remotes.get(remote.name) is not remote:
                return
            if version not in self._published or version < self._versions.get(remote.name, 0):
                raise InvalidResponse(f"weights version {version}, which the run has not published")
            self._versions[remote.name], self._was_ready = version, True
            self._work.update(remote.name, remote.statistics)
            self._dispatch()
            self.changed.notify_all()

    def refused(self, remote: Remote, request_id: int, problem: str) -> None:
        """It cannot compute this request, and no other generator could."""
        with self.changed:
            request = self._requests.get(request_id)
            if request and request.generator == remote.name and self._remotes.get(remote.name) is remote:
                request.refusal = one_line(problem, 1000)
                self.changed.notify_all()

    def incompatible(self, remote: Remote, problem: str) -> None:
        """It can never sample for this run, e.g. because its model differs."""
        if remote.name in self.required:
            self.fail(UserError(f"{remote.name}: {one_line(problem, 1000)}"))
        else:
            log.warning("%s cannot sample for this run: %s", remote.name, one_line(problem, 1000))

    def lost(self, remote: Remote, why: str, invalid: bool = False) -> None:
        """It is gone and has closed itself: others continue its samples. invalid: it must not join again."""
        with self.changed:
            if self._remotes.get(remote.name) is not remote:
                return
            reason = one_line(why)
            if invalid:
                self.banned.add(remote.name)
                reason = f"it sent invalid data ({reason}), and gets no more requests"
            unfinished = self._unfinished_at(remote.name)
            self.leave(remote.name)
            others = f"{len(self._versions)} others continue" if self._versions else "the next one gets"
            self._last_loss = f"; the last one, {remote.name}: {reason}"
            log.warning("%s: %s; %s its %d unfinished samples", remote.name, reason, others, unfinished)
            self.changed.notify_all()
