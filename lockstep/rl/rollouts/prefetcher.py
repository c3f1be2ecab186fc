"""Rollouts that are sampled ahead of their step, while earlier steps are trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from lockstep.generate.sampler import CachingSampler, Sampler
from lockstep.rl.environments.protocol import Example
from lockstep.rl.rollouts.ledger import LedgerError
from lockstep.rl.rollouts.prompts import PromptLoader
from lockstep.rl.rollouts.records import Rollout
from lockstep.rl.rollouts.sampling import Sampling


class SampledRound(NamedTuple):
    """One round of a step's sampling."""

    examples: list[Example]
    """All that were requested."""
    rollouts: list[Rollout]
    """Of the groups that were wanted; a group's number is the index of its example."""
    places: list[int]
    """Positions of the examples in the order of the whole run."""


class RolloutPrefetcher:
    """Samples each step's rollouts, its first round up to `depth` steps ahead.

    Steps get their prompts, and are trained, in order, however long each takes. A step's prompts are requested once
    weights version `step - 1 - depth` is available, so no token is older: that is what `actors.max_staleness`
    guarantees.
    """

    def __init__(
        self,
        source: Sampling,
        prompts: PromptLoader,
        sampler: Sampler,
        prompts_per_step: int,
        depth: int = 0,
        caching_sampler: Callable[[dict[str, Any]], CachingSampler] | None = None,
        oversampling: float = 1.0,
    ):
        """caching_sampler: as in `Generators`, for depth > 0. oversampling: prompts requested per prompt wanted."""
        self._source, self._prompts, self._sampler = source, prompts, sampler
        self._prompts_per_step, self.depth, self._caching_sampler = prompts_per_step, depth, caching_sampler
        self._oversampling = oversampling
        self._threads = ThreadPoolExecutor(depth + 1, "prefetcher")
        self._in_flight: dict[int, _StepInFlight] = {}
        self._returned_places: list[int] = []
        """Positions of prompts that were in flight when the run was saved: they are requested before others."""
        self._saved_samples: dict[str, Any] = {}
        """Samples that were in flight when the run was saved, by request."""
        self.completed = 0
        """The last complete step."""
        self._current: list[_StepInFlight] = []
        """The first round of the step in progress, if it was sampled ahead."""
        self._current_places: list[int] = []
        """Positions of the other prompts that the step in progress has taken."""

    def begin(self, step: int, last: int) -> None:
        """Requests the first rounds of the steps up to `step + depth`, but not beyond `last`."""
        if self.depth:
            for later in range(step, min(step + self.depth, last) + 1):
                if later not in self._in_flight:
                    self._request(later)

    def complete(self, step: int) -> None:
        """From here on, `state` is that after `step`; until then, the step in progress counts as in flight."""
        self.completed, self._current, self._current_places = step, [], []

    def take_round(self, step: int, extra_round: int, missing: int) -> Callable[[], SampledRound]:
        """Takes the prompts of a step's round, of `missing` groups unless they were requested before.

        Returns what samples it, or waits for it, and may be interrupted: the prompts are in flight from here on. It
        re-raises the source's exception, and raises LedgerError if a token is older than `depth` allows.
        """
        if extra_round or step not in self._in_flight:
            places = self._take(missing)
            self._current_places += places
            examples = [self._prompts.at(place) for place in places]
            sample = partial(self._source.draw, examples, step, extra_round, self._sampler, missing)
            return lambda: SampledRound(examples, self._checked(step, sample()), places)
        in_flight = self._in_flight.pop(step)
        self._current = [in_flight]
        examples, places = in_flight.examples, in_flight.places
        return lambda: SampledRound(examples, self._checked(step, in_flight.rollouts.result()), places)

    def _checked(self, step: int, rollouts: list[Rollout]) -> list[Rollout]:
        oldest = min((min(rollout.versions or [rollout.version]) for rollout in rollouts), default=step)
        if oldest < step - 1 - self.depth and not self._source.is_recorded:
            raise LedgerError(
                f"step {step} was sampled from weights version {oldest}, older than actors.max_staleness "
                f"{self.depth} allows; this is a bug in Lockstep"
            )
        return rollouts

    def wait(self) -> None:
        """Waits for the steps that are sampled from weights older than those after the last complete step."""
        older = [of_step for step, of_step in self._in_flight.items() if step <= self.completed + self.depth]
        wait([of_step.rollouts for of_step in self._current + older])

    def metrics(self) -> dict[str, float]:
        """Steps requested so far, and their samples: how many are ready, and how many are still in flight."""
        if not self.depth:
            return {}
        steps = list(self._in_flight.values())
        samples = [of_step.samples() for of_step in steps]
        return {
            "buffer/steps_ready": sum(of_step.is_ready for of_step in steps),
            "buffer/steps_in_flight": sum(not of_step.is_ready for of_step in steps),
            "buffer/samples_ready": sum(finished for finished, _ in samples),
            "buffer/samples_in_flight": sum(unfinished for _, unfinished in samples),
        }

    def state(self) -> dict[str, Any]:
        """What is in flight after the last complete step, JSON-able: the positions of its prompts in the order in which
        a resumed run takes them, and their samples so far."""
        samples = dict(self._saved_samples)
        steps = self._current + [of_step for _, of_step in sorted(self._in_flight.items())]
        for of_step in steps:
            samples |= of_step.sampler.state()
        places = [place for of_step in steps for place in of_step.places]
        return {"prompts": places + self._current_places + self._returned_places, "samples": samples}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Its prompts are requested before others, and if steps are sampled ahead, their samples continue."""
        if state is None:
            return
        self._returned_places, self._saved_samples = (
            list(state["prompts"]),
            dict(state["samples"]) if self.depth else {},
        )

    def close(self) -> None:
        """Aborts what is in flight. Its threads may wait for conversations, so graders are closed before."""
        steps = [*self._current, *self._in_flight.values()]
        for of_step in steps:
            of_step.sampler.close()
        self._threads.shutdown()

    def _take(self, wanted: int) -> list[int]:
        """The positions of the next prompts, for this many groups."""
        count = math.ceil(round(self._oversampling * wanted, 6))  # 1.1 times 10 is 11
        places, self._returned_places = self._returned_places[:count], self._returned_places[count:]
        return places + (self._prompts.next_places(count - len(places)) if len(places) < count else [])

    def _request(self, step: int) -> None:
        assert self._caching_sampler is not None
        places = self._take(self._prompts_per_step)
        # Samples of a run that was saved with a larger depth can be older.
        oldest = step - 1 - self.depth
        fresh = {key: samples for key, samples in self._saved_samples.items() if _oldest(samples, step) >= oldest}
        sampler = self._caching_sampler(fresh)
        if not self._returned_places:
            self._saved_samples = {}
        examples = [self._prompts.at(place) for place in places]
        draw = partial(self._source.draw, examples, step, 0, sampler, self._prompts_per_step)
        self._in_flight[step] = in_flight = _StepInFlight(places, examples, sampler, self._threads.submit(draw))
        # Otherwise it would be a race whether its samples are requested before the next weights arrive.
        while self._source.requests_at_once and not in_flight.is_ready and not sampler.asked.wait(0.02):
            pass


def _oldest(samples: Sequence[dict[str, Any]], otherwise: int) -> int:
    """The oldest version that any token of a request's samples comes from; `otherwise` if there is no token."""
    return min((version for sample in samples for version in sample["versions"]), default=otherwise)


@dataclass
class _StepInFlight:
    """A step's first round, sampled in a thread."""

    places: list[int]
    examples: list[Example]
    sampler: CachingSampler
    rollouts: Future[list[Rollout]]

    @property
    def is_ready(self) -> bool:
        return self.rollouts.done()

    def samples(self) -> tuple[int, int]:
        """Finished and unfinished samples; a step that is ready has none of the latter, as stragglers are stopped."""
        finished, unfinished = self.sampler.count()
        return finished, 0 if self.is_ready else unfinished
