"""The generator pool behind the interface of one engine."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lockstep.errors import RunStopped, UserError
from lockstep.generate import Completion, SamplingParams
from lockstep.generate.stragglers import stragglers
from lockstep.rl.generators.pool import GeneratorPool
from lockstep.rl.generators.remote import RemoteSample, Request


class PoolSampler:
    """A `CachingSampler` of the pool's generators. Thread-safe."""

    def __init__(self, pool: GeneratorPool, saved: Mapping[str, Any] | None = None):
        """saved: an earlier one's `state`, from whose samples equal requests continue. None: keeps no requests, so that
        it can be used for a whole run."""
        self._pool, self._saved, self._keeps = pool, saved or {}, saved is not None
        self.max_positions, self.cache_tokens = pool.max_positions, pool.cache_tokens
        self._kept: dict[str, Request] = {}
        """By digest."""
        self._repeats: Counter[str] = Counter()
        """How often each digest was requested."""
        self._added: dict[int, Request] = {}
        """Those whose `samples` have not been fetched yet."""
        self.asked = threading.Event()
        """Set once `generate` has requested its samples."""
        self._closed = False

    @property
    def weights_version(self) -> int:
        return self._pool.weights_version

    def generate(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams],
        first: int | None = None,
    ) -> list[list[Completion]]:
        """As `Engine.generate`. Raises as `GeneratorPool.wait`."""
        listed = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(listed) != len(prompts):
            raise UserError(
                f"{len(prompts)} prompts but {len(listed)} sampling parameters; give one, or one per prompt"
            )
        requests = [self._begin(*each) for each in zip(prompts, listed)]
        self.asked.set()
        return self._complete(requests, first)

    def add(self, prompt: list[int], params: SamplingParams) -> int:
        request = self._begin(prompt, params)
        self._added[request.id] = request
        return request.id

    def samples(self, request_id: int) -> Sequence[RemoteSample]:
        """The samples of a request, which may be finished by now; can be called once."""
        return self._added.pop(request_id).samples

    def step(self) -> None:
        """Waits briefly for samples. Raises as `GeneratorPool.wait`."""
        if self._closed:
            raise RunStopped("the run ends", exit_code=1)
        self._pool.wait(self)

    def abort(self, request_id: int) -> None:
        self._added.pop(request_id, None)
        self._pool.abort(request_id)

    def state(self) -> dict[str, Any]:
        with self._pool.changed:  # no sample grows meanwhile
            samples = {
                digest: [asdict(sample.completion()) for sample in request.samples]
                for digest, request in self._kept.items()
            }
            # Saved samples that have not been requested again yet may still be.
            return {**self._saved, **samples}

    def count(self) -> tuple[int, int]:
        with self._pool.changed:
            unfinished = sum(request.unfinished for request in self._kept.values())
            return sum(len(request.samples) for request in self._kept.values()) - unfinished, unfinished

    def close(self) -> None:
        """Ends its requests: callers waiting for their samples get RunStopped."""
        with self._pool.changed:
            self._closed = True
            self._pool.changed.notify_all()

    def _begin(self, prompt: list[int], params: SamplingParams) -> Request:
        if not self._keeps:
            return self._pool.begin(prompt, params, owner=self)
        digest = hashlib.sha256(json.dumps([prompt, asdict(params)]).encode()).hexdigest()
        self._repeats[digest] += 1
        if (number := self._repeats[digest]) > 1:
            digest += f" {number}"  # equal requests have separate samples
        begun = [Completion(**sample) for sample in self._saved.get(digest, ())]
        with self._pool.changed:
            request = self._kept[digest] = self._pool.begin(prompt, params, begun, self)
        return request

    def _complete(self, requests: Sequence[Request], first: int | None) -> list[list[Completion]]:
        remaining = dict(enumerate(requests))
        try:
            with self._pool.changed:
                while self._unfinished(remaining, first):
                    self.step()
        finally:
            for request in requests:
                self._pool.abort(request.id)
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
                self._pool.abort(remaining.pop(number).id)
        return any(request.unfinished for request in remaining.values())
