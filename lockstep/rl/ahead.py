"""Rollouts that are sampled before their step is due, while the steps before it are trained."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from lockstep.generate.sampler import Remembering, Sampler
from lockstep.rl.environment import Example
from lockstep.rl.ledger import LedgerError
from lockstep.rl.prompts import PromptLoader
from lockstep.rl.rollouts import Rollout

Draw = Callable[[Sequence[Example], int, int, Sampler], list[Rollout]]
"""Rollouts of these examples for a step, in one of its rounds, from this sampler."""


class Ahead:
    """Draws each step's rollouts, its first round up to `depth` steps before it is due.

    Steps are drawn with the prompts, and trained, in their order, whatever takes how long. A step's prompts are asked
    once version `step - 1 - depth` of the weights is there, so that no token is older: that is the promise of
    `actors.max_staleness`.
    """

    def __init__(
        self,
        draw: Draw,
        prompts: PromptLoader,
        sampler: Sampler,
        count: int,
        depth: int = 0,
        remembering: Callable[[dict[str, Any]], Remembering] | None = None,
    ):
        """count: prompts of a step. remembering: makes samplers that keep what they were asked; none with depth 0."""
        self._draw, self._prompts, self._sampler = draw, prompts, sampler
        self._count, self.depth, self._remembering = count, depth, remembering
        self._begun: dict[int, _Begun] = {}
        self._owed: dict[int, list[Example]] = {}
        """Prompts that were under way when the run was saved, where nothing is sampled ahead now."""

    def begin(self, step: int, last: int) -> None:
        """Asks for the first rounds of the steps up to `step + depth`, as far as there are so many."""
        if self.depth:
            for later in range(step, min(step + self.depth, last) + 1):
                if later not in self._begun:
                    self._begin(later, self._prompts.next(self._count))

    def drawn(self, step: int, extra_round: int, missing: int) -> tuple[list[Example], list[Rollout]]:
        """The prompts of a step's round, `missing` ones unless they were asked before, and their rollouts.

        Raises what drawing them raised, and LedgerError where a token is older than `depth` allows.
        """
        if extra_round or step not in self._begun:
            owed = [] if extra_round else self._owed.pop(step, [])
            asked = owed or self._prompts.next(missing)
            rollouts = self._draw(asked, step, extra_round, self._sampler)
        else:
            begun = self._begun[step]
            asked, rollouts = begun.examples, begun.rollouts()
            # Until here a checkpoint would hold them.
            del self._begun[step]
        oldest = min((min(rollout.versions or [rollout.version]) for rollout in rollouts), default=step)
        if oldest < step - 1 - self.depth:
            raise LedgerError(
                f"step {step} was sampled from weights of version {oldest}, older than actors.max_staleness "
                f"{self.depth} allows; this is a bug of Lockstep"
            )
        return asked, rollouts

    def state(self) -> dict[str, Any]:
        """What is under way, JSON-able: each step's prompts, and their samples as far as they have come."""
        places = {id(example): place for place, example in enumerate(self._prompts.examples)}
        return {
            str(step): {
                "prompts": [places[id(example)] for example in begun.examples],
                "samples": begun.sampler.state(),
            }
            for step, begun in self._begun.items()
        } | {str(step): {"prompts": [places[id(e)] for e in owed], "samples": {}} for step, owed in self._owed.items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on with what was under way: its prompts are asked again, and its samples go on where they were.

        Raises what dictionaries and lists raise, for what `state` has not returned.
        """
        for step, plain in sorted(state.items(), key=lambda item: int(item[0])):
            examples = [self._prompts.examples[place] for place in plain["prompts"]]
            if self.depth:
                self._begin(int(step), examples, plain["samples"])
            else:
                self._owed[int(step)] = examples

    def close(self) -> None:
        """Waits for what is under way, whose sampler has been closed before."""
        for begun in self._begun.values():
            begun.thread.join()

    def _begin(self, step: int, examples: list[Example], kept: dict[str, Any] | None = None) -> None:
        assert self._remembering is not None
        sampler = self._remembering(kept or {})
        self._begun[step] = _Begun(examples, sampler, lambda: self._draw(examples, step, 0, sampler))


class _Begun:
    """A step's first round, drawn in a thread."""

    def __init__(self, examples: list[Example], sampler: Remembering, draw: Callable[[], list[Rollout]]):
        self.examples, self.sampler = examples, sampler
        self._found: list[Rollout] | BaseException = []
        self.thread = threading.Thread(target=self._run, args=(draw,), name="ahead", daemon=True)
        self.thread.start()

    def _run(self, draw: Callable[[], list[Rollout]]) -> None:
        try:
            self._found = draw()
        except BaseException as error:  # whoever wants the rollouts gets it
            self._found = error

    def rollouts(self) -> list[Rollout]:
        while self.thread.is_alive():
            self.thread.join(0.1)  # so that signals are heard
        if isinstance(self._found, BaseException):
            raise self._found
        return self._found
