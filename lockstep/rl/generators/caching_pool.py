"""A view of the generator pool that saves its requests' samples, for steps that are sampled ahead."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lockstep.generate import Completion, SamplingParams
from lockstep.rl.generators.pool import GeneratorPool, pair_up
from lockstep.rl.generators.remote import RemoteSample, Request


class CachingGeneratorPool:
    """A `CachingSampler` of the pool's generators."""

    def __init__(self, pool: GeneratorPool, saved: Mapping[str, Any]):
        """saved: an earlier one's `state`, from whose samples equal requests continue."""
        self._pool, self._saved = pool, saved
        self._requests: dict[str, Request] = {}
        """By digest."""
        self._repeats: Counter[str] = Counter()
        """How often each digest was requested."""
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
        requests = [self._begin(*each) for each in pair_up(prompts, params)]
        self.asked.set()
        return self._pool.complete(requests, first, self)

    def add(self, prompt: list[int], params: SamplingParams) -> int:
        return self._begin(prompt, params).id

    def samples(self, request_id: int) -> Sequence[RemoteSample]:
        return next(request.samples for request in self._requests.values() if request.id == request_id)

    def step(self) -> None:
        self._pool.step(self)

    def abort(self, request_id: int) -> None:
        self._pool.abort(request_id)

    def state(self) -> dict[str, Any]:
        with self._pool.changed:  # no sample grows meanwhile
            samples = {
                digest: [asdict(sample.completion()) for sample in request.samples]
                for digest, request in self._requests.items()
            }
            # Saved samples that have not been requested again yet may still be.
            return {**self._saved, **samples}

    def count(self) -> tuple[int, int]:
        with self._pool.changed:
            unfinished = sum(request.unfinished for request in self._requests.values())
            return sum(len(request.samples) for request in self._requests.values()) - unfinished, unfinished

    def close(self) -> None:
        self._pool.cancel(self)

    def _begin(self, prompt: list[int], params: SamplingParams) -> Request:
        digest = hashlib.sha256(json.dumps([prompt, asdict(params)]).encode()).hexdigest()
        self._repeats[digest] += 1
        if (number := self._repeats[digest]) > 1:
            digest += f" {number}"  # equal requests have separate samples
        begun = [Completion(**sample) for sample in self._saved.get(digest, ())]
        with self._pool.changed:
            request = self._requests[digest] = self._pool.begin(prompt, params, begun, self)
        return request
