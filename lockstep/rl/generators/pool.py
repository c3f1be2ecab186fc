"""Remote generators behind the interface of one engine: each request goes to one, and to another if that one dies.

A request's samples depend only on its seed and the weights, not on who computes them: a generator that continues where
another stopped draws the tokens that the other would have drawn.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from lockstep.errors import RunStopped, UserError, one_line
from lockstep.generate import Completion, SamplingParams
from lockstep.generate.stragglers import stragglers
from lockstep.observe import log
from lockstep.rl.generators.remote import Remote, RemoteSample, Request
from lockstep.rl.generators.response_checks import checked_samples, checked_version
from lockstep.rl.generators.work_log import WorkLog
from lockstep.rl.weights.server import WeightManifest

GLANCE = 0.02
"""Seconds that one `step` waits for news, at most."""


class GeneratorPool:
    """The generators of a run. A `Sampler`, and the `Reports` of its remotes. Any thread may call it."""

    def __init__(
        self,
        max_positions: int,
        cache_tokens: int,
        start_seconds: float,
        finish: bool = False,
        vocab_size: int = 2**31,
        eos_token_ids: Sequence[int] = (),
    ):
        """start_seconds: how long there may be no generator at all. finish: whether requests are sampled from the
        weights that are the newest when they are made, however fast each generator is. vocab_size, eos_token_ids: the
        model's."""
        self.max_positions, self.cache_tokens = max_positions, cache_tokens
        self._vocab_size, self._eos_token_ids = vocab_size, eos_token_ids
        self.start_seconds, self._finish = start_seconds, finish
        self.advice = "fix what prevents them from starting"
        """What to do, for the message, where none was ever ready."""
        self.required: set[str] = set()
        """Names of the generators that the run started itself: if one of them is unfit, the run ends."""
        self.false: set[str] = set()
        """Names of the generators that have sent invalid data: none of them gets another request."""
        self.weights_version = 0
        self._manifest: WeightManifest | None = None
        self.changed = threading.Condition(threading.RLock())
        self._remotes: dict[str, Remote] = {}
        """Those that sample, and those that are still loading."""
        self._versions: dict[str, int] = {}
        """Version of the weights that each has; one that is loading has none."""
        self._requests: dict[int, Request] = {}
        """Those that are not finished."""
        self._asked: dict[int, str] = {}
        """The generator that has each of them."""
        self._added: dict[int, Request] = {}
        """Those whose samples have not been fetched yet (`samples`)."""
        self._refused: dict[int, str] = {}
        self._next_id = 0
        self.heard = 0
        """Incremented with every report from a generator."""
        self._none_since = time.monotonic()
        self._was_ready = False
        """Whether any generator has ever had weights."""
        self._first_version = 0
        self._last_loss = ""
        self._failure: Exception | None = None
        self._dismissed: set[object] = set()
        """Askers whose samples are no longer wanted."""
        self._work = WorkLog()

    # A Sampler. Finished requests are forgotten here; `remembering` keeps them.

    def generate(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams],
        first: int | None = None,
    ) -> list[list[Completion]]:
        """As `Engine.generate`. Raises RunStopped if no generator is left, UserError if there never was one."""
        return self.complete([self.begin(*each) for each in _pairs(prompts, params)], first)

    def begin(
        self, prompt: list[int], params: SamplingParams, begun: Sequence[Completion] = (), asker: object = None
    ) -> Request:
        """Requests a prompt's samples, which continue those in `begun`."""
        seed = secrets.randbits(62) if params.seed is None else params.seed
        samples = [RemoteSample.begun(completion) for completion in begun] or [RemoteSample() for _ in range(params.n)]
        with self.changed:
            request = Request(self._next_id, list(prompt), replace(params, seed=seed), samples, asker)
            self._next_id += 1
            if request.unfinished:
                self._requests[request.id] = request
                self._hand_out()
        return request

    def complete(
        self, requests: Sequence[Request], first: int | None = None, asker: object = None
    ) -> list[list[Completion]]:
        """Waits for all samples of all requests of `asker`, or for the `first` of them, as `generate` does.

        Raises as `generate`; the requests are aborted then.
        """
        wanted = dict(enumerate(requests))
        try:
            with self.changed:
                while self._unfinished(wanted, first):
                    self._raise_problems([request.id for request in wanted.values()], asker)
                    self.changed.wait(GLANCE)
        finally:
            for request in requests:
                self.abort(request.id)
        for number, request in wanted.items():
            if any(sample.finish_reason == "error" for sample in request.samples):
                raise UserError(
                    f"prompt {number}: its logits are not finite (NaN or infinite) with weights version "
                    f"{self.weights_version}; check the weights, or load those of an earlier checkpoint"
                )
        return [
            [sample.completion() for sample in request.samples] if number in wanted else []
            for number, request in enumerate(requests)
        ]

    def _unfinished(self, wanted: dict[int, Request], first: int | None) -> bool:
        """Whether any is unfinished; those that are not among the `first` are aborted and removed."""
        if first is not None:
            for number in stragglers({number: request.samples for number, request in wanted.items()}, first):
                self.abort(wanted.pop(number).id)
        return any(request.unfinished for request in wanted.values())

    def add(self, prompt: list[int], params: SamplingParams) -> int:
        with self.changed:
            request = self.begin(prompt, params)
            self._added[request.id] = request
            return request.id

    def samples(self, request_id: int) -> Sequence[RemoteSample]:
        """The samples of a request, which may be finished by now; can be called once."""
        return self._added.pop(request_id).samples

    def step(self, asker: object = None) -> None:
        """Waits for news, for a moment. Raises as `generate`, and for refused requests only if they are `asker`'s."""
        with self.changed:
            refused = [request for request in self._refused if self._requests[request].asker is asker]
            self._raise_problems(refused, asker)
            self.changed.wait(GLANCE)

    def abort(self, request_id: int) -> None:
        with self.changed:
            self._requests.pop(request_id, None)
            self._added.pop(request_id, None)
            self._refused.pop(request_id, None)
            if name := self._asked.pop(request_id, None):
                self._remotes[name].abort(request_id)
            self._hand_out()

    def dismiss(self, asker: object) -> None:
        """Whoever waits for samples of this asker, now or later, gets RunStopped."""
        with self.changed:
            self._dismissed.add(asker)
            self.changed.notify_all()

    def _raise_problems(self, requests: Sequence[int], asker: object = None) -> None:
        if self._failure is not None:
            raise self._failure
        if asker in self._dismissed:
            raise RunStopped("the run ends", exit_code=1)
        for request in requests:
            if request in self._refused:
                raise UserError(self._refused[request])
        if not self._versions and time.monotonic() - self._none_since > self.start_seconds:
            raise self.none_left(
                f"no generator has been ready for {self.start_seconds:g} s (actors.start_seconds){self._last_loss}"
            )

    def none_left(self, problem: str) -> Exception:
        """The error for a run without generators: if none was ever ready, something is wrong with its settings."""
        if self._was_ready:
            return RunStopped(
                f"{problem}; their logs are in the run's folder, under logs/. --resume continues from the newest "
                "checkpoint",
                exit_code=1,
            )
        # A new run leaves no folder then.
        return UserError(
            f"{problem}. None has been ready since the run started; {self.advice}, or raise actors.start_seconds, and "
            "start the run again"
        )

    # Its remotes.

    def join(self, remote: Remote) -> None:
        """Adds a generator that is loading; it gets the newest weights first, and requests once it has them."""
        with self.changed:
            self._remotes[remote.name] = remote
            if self._manifest is not None:
                remote.load_weights(self._manifest)

    def leave(self, name: str) -> Remote | None:
        """Removes a generator, whose samples others continue; returns it, if it was in the fleet."""
        with self.changed:
            remote = self._remotes.pop(name, None)
            self._work.left(name)
            if self._versions.pop(name, None) is not None and not self._versions:
                self._none_since = time.monotonic()
            for request in [request for request, asked in self._asked.items() if asked == name]:
                del self._asked[request]
            self._hand_out()
            return remote

    def load_weights(self, manifest: WeightManifest) -> None:
        """Every generator takes these before any later request."""
        with self.changed:
            if self._finish:
                # Requests still waiting for room here would be sent after the new weights.
                self._hand_out(all_of_them=True)
            if self._manifest is None:
                self._first_version = manifest["version"]
            self._manifest, self.weights_version = manifest, manifest["version"]
            for remote in list(self._remotes.values()):
                remote.load_weights(manifest)

    def wait_for_weights(self, seconds: float = float("inf")) -> None:
        """Returns once there is a generator, and all that are ready have the newest weights. Raises as `step`."""
        until = time.monotonic() + seconds
        with self.changed:
            while not self._versions or any(version < self.weights_version for version in self._versions.values()):
                self._raise_problems([])
                if time.monotonic() > until:
                    return
                self.changed.wait(GLANCE)

    def fail(self, error: Exception) -> None:
        """Whoever waits or makes a request, now or later, gets `error`."""
        with self.changed:
            self._failure = self._failure or error
            self.changed.notify_all()

    def metrics(self) -> dict[str, float]:
        """What each generator has done since the last call, as `generators/NAME/…`."""
        with self.changed:
            held = {name: self._samples_at(name) for name in self._versions}
            return self._work.metrics({name: self._remotes[name].did for name in held}, held)

    def trace_events(self) -> list[dict[str, Any]]:
        """When generators sampled, took weights and were idle, as Chrome's trace events."""
        with self.changed:
            return self._work.events()

    @property
    def names(self) -> list[str]:
        """Names of all that have joined, ready or not."""
        with self.changed:
            return sorted(self._remotes)

    def remote(self, name: str) -> Remote | None:
        """The generator of this name, ready or not."""
        return self._remotes.get(name)

    @property
    def ready(self) -> list[str]:
        """Names of those that sample."""
        with self.changed:
            return sorted(self._versions)

    def _hand_out(self, all_of_them: bool = False) -> None:
        """Sends waiting requests to the generators with the most room, in the order in which they came.

        all_of_them: even those for which no generator has room.
        """
        load = {name: self._samples_at(name) for name in self._versions}
        for request in self._requests.values():
            if request.id in self._asked or not load or not request.unfinished:
                continue
            name = min(load, key=lambda each: (load[each], each))
            remote = self._remotes[name]
            if not all_of_them and load[name] and load[name] + request.unfinished > 2 * remote.room:
                return
            self._asked[request.id], request.given_version = name, self._versions[name]
            request.given_at = request.given_at or time.monotonic()
            load[name] += request.unfinished
            remote.ask(request)

    def _samples_at(self, name: str) -> int:
        return sum(self._requests[request].unfinished for request, asked in self._asked.items() if asked == name)

    # Reports.

    def sampled(self, remote: Remote, parts: Sequence[tuple[int, int, RemoteSample]]) -> None:
        with self.changed:
            self.heard += 1
            if self._remotes.get(remote.name) is not remote:
                return  # it was given up, and others continue its samples
            has = {number: self._requests[number] for number, name in self._asked.items() if name == remote.name}
            told = checked_samples(parts, has, self._next_id - 1, self._given, self._vocab_size, self._eos_token_ids)
            self._work.heard(remote.name, remote.did)
            for asked, index, new in told:
                asked.first_at = asked.first_at or time.monotonic()
                _extend(asked.samples[index], new, bool(asked.params.routes))
            for request_id in {part[0] for part in parts}:
                request = self._requests.get(request_id)
                if request and not request.unfinished and self._asked.get(request_id) == remote.name:
                    self._work.ended(remote.name, request)
                    del self._requests[request_id], self._asked[request_id]
            self._hand_out()
            self.changed.notify_all()

    @property
    def _given(self) -> range:
        """The weights versions that have been published."""
        return range(self._first_version, self.weights_version + 1)

    def has_weights(self, remote: Remote, version: int) -> None:
        with self.changed:
            self.heard += 1
            if self._remotes.get(remote.name) is remote:
                before = self._versions.get(remote.name, 0)
                self._versions[remote.name] = checked_version(version, before, self._given)
                self._was_ready = True
                self._work.heard(remote.name, remote.did)
                self._hand_out()
                self.changed.notify_all()

    def refused(self, remote: Remote, request_id: int, problem: str) -> None:
        with self.changed:
            if self._asked.get(request_id) == remote.name and self._remotes.get(remote.name) is remote:
                self._refused[request_id] = one_line(problem, 1000)
                self.changed.notify_all()

    def unfit(self, remote: Remote, problem: str) -> None:
        problem = one_line(problem, 1000)
        if remote.name in self.required:
            self.fail(UserError(f"{remote.name}: {problem}"))
        else:
            log.warning("%s cannot sample for this run: %s", remote.name, problem)

    def lost(self, remote: Remote, why: str, false: bool = False) -> None:
        with self.changed:
            if self._remotes.get(remote.name) is not remote:
                return
            if false:
                self.false.add(remote.name)
            unfinished = self._samples_at(remote.name)
            self.leave(remote.name)
            others = f"{len(self._versions)} others continue" if self._versions else "the next one gets"
            said = one_line(why)
            if false:
                said = f"it sent invalid data ({said}), and gets no more requests"
            self._last_loss = f"; the last one, {remote.name}: {said}"
            log.warning("%s: %s; %s its %d unfinished samples", remote.name, said, others, unfinished)
            self.changed.notify_all()


class CachingGeneratorPool:
    """A `Remembering` sampler: the fleet, with its requests kept as long as this object is."""

    def __init__(self, pool: GeneratorPool, kept: Mapping[str, Any]):
        """kept: what an earlier one's `state` returned; its samples continue from there."""
        self._pool, self._kept = pool, kept
        self._asked: dict[str, Request] = {}
        """Requests by digest."""
        self._times: Counter[str] = Counter()
        """How often each was requested."""
        self.asked = threading.Event()
        """Set once `generate` has requested its samples."""
        self.max_positions, self.cache_tokens = pool.max_positions, pool.cache_tokens

    @property
    def weights_version(self) -> int:
        return self._pool.weights_version

    def generate(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams],
        first: int | None = None,
    ) -> list[list[Completion]]:
        requests = [self._begin(*each) for each in _pairs(prompts, params)]
        self.asked.set()
        return self._pool.complete(requests, first, self)

    def add(self, prompt: list[int], params: SamplingParams) -> int:
        return self._begin(prompt, params).id

    def samples(self, request_id: int) -> Sequence[RemoteSample]:
        return next(request.samples for request in self._asked.values() if request.id == request_id)

    def step(self) -> None:
        self._pool.step(self)

    def abort(self, request_id: int) -> None:
        self._pool.abort(request_id)

    def state(self) -> dict[str, Any]:
        with self._pool.changed:  # no sample grows meanwhile
            # What was kept and has not been requested again yet may still be.
            return {
                **self._kept,
                **{
                    digest: [asdict(sample.completion()) for sample in request.samples]
                    for digest, request in self._asked.items()
                },
            }

    def count(self) -> tuple[int, int]:
        with self._pool.changed:
            unfinished = sum(request.unfinished for request in self._asked.values())
            return sum(len(request.samples) for request in self._asked.values()) - unfinished, unfinished

    def close(self) -> None:
        self._pool.dismiss(self)

    def _begin(self, prompt: list[int], params: SamplingParams) -> Request:
        digest = hashlib.sha256(json.dumps([prompt, asdict(params)]).encode()).hexdigest()
        self._times[digest] += 1
        if (number := self._times[digest]) > 1:
            digest += f" {number}"  # equal requests have separate samples
        begun = [Completion(**plain) for plain in self._kept.get(digest, ())]
        with self._pool.changed:
            request = self._asked[digest] = self._pool.begin(prompt, params, begun, self)
        return request


def _pairs(
    prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[tuple[list[int], SamplingParams]]:
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    if len(each) != len(prompts):
        raise UserError(f"{len(prompts)} prompts but {len(each)} sampling parameters; give one, or one per prompt")
    return list(zip(prompts, each))


def _extend(sample: RemoteSample, new: RemoteSample, with_routes: bool) -> None:
    sample.token_ids += new.token_ids
    sample.logprobs += new.logprobs
    sample.cut_logprobs += new.cut_logprobs
    sample.versions += new.versions
    if with_routes:  # one per token, whoever sampled it
        sample.routes += new.routes or [""] * len(new.token_ids)
    sample.finish_reason = new.finish_reason
