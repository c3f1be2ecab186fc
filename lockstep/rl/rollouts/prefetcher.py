"""Rollouts that are sampled before their step is due, while earlier steps are trained."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lockstep.generate.sampler import CachingSampler, Sampler
from lockstep.rl.environments.protocol import Example
from lockstep.rl.rollouts.ledger import LedgerError
from lockstep.rl.rollouts.prompts import PromptLoader
from lockstep.rl.rollouts.records import Rollout

Draw = Callable[[Sequence[Example], int, int, Sampler, int], list[Rollout]]
"""Arguments: examples, step, round of the step, sampler, number of groups wanted."""


class Drawn(NamedTuple):
    """One round of a step."""

    examples: list[Example]
    """All that were requested."""
    rollouts: list[Rollout]
    """Of the groups that were wanted; a group's number is that of its example."""
    places: list[int]
    """Positions of the examples in the order of the whole run."""


class RolloutPrefetcher:
    """Draws each step's rollouts, its first round up to `depth` steps before it is due.

    Steps get their prompts, and are trained, in order, however long each takes. A step's prompts are requested once
    weights version `step - 1 - depth` is available, so no token is older: that is what `actors.max_staleness`
    guarantees.
    """

    def __init__(
        self,
        draw: Draw,
        prompts: PromptLoader,
        sampler: Sampler,
        count: int,
        depth: int = 0,
        remembering: Callable[[dict[str, Any]], CachingSampler] | None = None,
        at_once: bool = True,
        recorded: bool = False,
        oversampling: float = 1.0,
    ):
        """count: prompts per step. remembering: makes samplers that keep their requests; None with depth 0.
        at_once: whether `draw` requests all samples of a step in one `generate`, not one after another.
        recorded: whether `draw` returns what another run sampled, as stale as that run allowed.
        oversampling: prompts requested for each one that is wanted.
        """
        self._draw, self._prompts, self._sampler = draw, prompts, sampler
        self._count, self.depth, self._remembering, self._at_once = count, depth, remembering, at_once
        self._recorded, self._oversampling = recorded, oversampling
        self._begun: dict[int, _Begun] = {}
        self._owed: list[int] = []
        """Positions of prompts that were in flight when the run was saved: they are requested before others."""
        self._kept: dict[str, Any] = {}
        """Samples that were in flight then."""
        self.completed = 0
        """The last complete step."""
        self._current: list[_Begun] = []
        """The first round of the step in progress, if it was sampled ahead."""
        self._current_places: list[int] = []
        """Positions of the prompts that the step in progress has taken besides."""

    def begin(self, step: int, last: int) -> None:
        """Requests the first rounds of the steps up to `step + depth`, but not beyond `last`."""
        if self.depth:
            for later in range(step, min(step + self.depth, last) + 1):
                if later not in self._begun:
                    self._begin(later)

    def complete(self, step: int) -> None:
        """From here on, `state` is that after `step`; until then, the step in progress counts as in flight."""
        self.completed, self._current, self._current_places = step, [], []

    def drawn(self, step: int, extra_round: int, missing: int) -> Drawn:
        """A step's round, of `missing` groups unless they were requested before.

        Raises what drawing them raised, and LedgerError if a token is older than `depth` allows.
        """
        if extra_round or step not in self._begun:
            places = self._take(missing)
            self._current_places += places
            asked = [self._prompts.at(place) for place in places]
            rollouts = self._draw(asked, step, extra_round, self._sampler, missing)
        else:
            begun = self._begun[step]
            places, asked, rollouts = begun.places, begun.examples, begun.rollouts()
            self._current = [self._begun.pop(step)]
        oldest = min((min(rollout.versions or [rollout.version]) for rollout in rollouts), default=step)
        if oldest < step - 1 - self.depth and not self._recorded:
            raise LedgerError(
                f"step {step} was sampled from weights version {oldest}, older than actors.max_staleness "
                f"{self.depth} allows; this is a bug in Lockstep"
            )
        return Drawn(asked, rollouts, places)

    def wait(self) -> None:
        """Waits until all that weights older than those after the last complete step sample has arrived, or failed."""
        for step, begun in self._begun.items():
            if step <= self.completed + self.depth:
                begun.wait()

    def metrics(self) -> dict[str, float]:
        """Steps requested so far, and their samples: how many are ready, and how many are still in flight."""
        if not self.depth:
            return {}
        begun = list(self._begun.values())
        samples = [each.samples() for each in begun]
        return {
            "buffer/steps_ready": sum(each.is_ready for each in begun),
            "buffer/steps_in_flight": sum(not each.is_ready for each in begun),
            "buffer/samples_ready": sum(ended for ended, _ in samples),
            "buffer/samples_in_flight": sum(going_on for _, going_on in samples),
        }

    def state(self) -> dict[str, Any]:
        """What is in flight after the last complete step, JSON-able: the positions of its prompts in the order in which
        a resumed run takes them, and their samples so far."""
        samples = dict(self._kept)
        in_flight = self._current + [begun for _, begun in sorted(self._begun.items())]
        for begun in in_flight:
            samples |= begun.sampler.state()
        places = [place for begun in in_flight for place in begun.places]
        return {"prompts": places + self._current_places + self._owed, "samples": samples}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Its prompts are requested before others, and if steps are sampled ahead, their samples continue."""
        if state is None:
            return
        self._owed, self._kept = list(state["prompts"]), dict(state["samples"]) if self.depth else {}

    def close(self) -> None:
        """Ends what is in flight."""
        for begun in self._begun.values():
            begun.sampler.close()
        for begun in self._begun.values():
            begun.thread.join()

    def _take(self, wanted: int) -> list[int]:
        """The positions of the next prompts, for this many groups."""
        count = math.ceil(round(self._oversampling * wanted, 6))  # 1.1 times 10 is 11
        owed, self._owed = self._owed[:count], self._owed[count:]
        return owed + (self._prompts.next_places(count - len(owed)) if len(owed) < count else [])

    def _begin(self, step: int) -> None:
        assert self._remembering is not None
        places = self._take(self._count)
        # A run saved with a larger depth has older ones.
        young = {key: kept for key, kept in self._kept.items() if _oldest(kept, step) >= step - 1 - self.depth}
        sampler = self._remembering(young)
        if not self._owed:
            self._kept = {}
        examples = [self._prompts.at(place) for place in places]
        begun = _Begun(places, examples, sampler, lambda: self._draw(examples, step, 0, sampler, self._count))
        self._begun[step] = begun
        # Otherwise it would be a race whether its samples are requested before the next weights arrive.
        while self._at_once and begun.thread.is_alive() and not sampler.asked.wait(0.02):
            pass


def _oldest(samples: Sequence[dict[str, Any]], otherwise: int) -> int:
    """The oldest version that any token of a request's samples comes from; `otherwise` if there is no token."""
    return min((version for sample in samples for version in sample["versions"]), default=otherwise)


class _Begun:
    """A step's first round, drawn in a thread."""

    def __init__(
        self, places: list[int], examples: list[Example], sampler: CachingSampler, draw: Callable[[], list[Rollout]]
    ):
        self.places, self.examples, self.sampler = places, examples, sampler
        self._found: list[Rollout] | BaseException = []
        self.thread = threading.Thread(target=self._run, args=(draw,), name="prefetcher", daemon=True)
        self.thread.start()

    def _run(self, draw: Callable[[], list[Rollout]]) -> None:
        try:
            self._found = draw()
        except BaseException as error:  # whoever wants the rollouts gets it
            self._found = error

    @property
    def is_ready(self) -> bool:
        return not self.thread.is_alive()

    def samples(self) -> tuple[int, int]:
        """Finished and unfinished samples; a step that is ready has none of the latter, as stragglers are stopped."""
        ended, going_on = self.sampler.count()
        return ended, 0 if self.is_ready else going_on

    def wait(self) -> None:
        while self.thread.is_alive():
            self.thread.join(0.1)  # so that signals are handled

    def rollouts(self) -> list[Rollout]:
        self.wait()
        if isinstance(self._found, BaseException):
            raise self._found
        return self._found
