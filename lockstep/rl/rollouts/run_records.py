"""What a run writes about its rollouts: one file per step, what became of the prompts, and samples for the trackers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from lockstep.observe import append_step
from lockstep.rl.rollouts.ledger import Ledger
from lockstep.rl.rollouts.records import Rollout, write_rollouts
from lockstep.rl.rollouts.samples import samples_of
from lockstep.run.session import Session


class RunRecords:
    """Writes into the run's folder and to its trackers, on rank 0. All ranks call its methods."""

    def __init__(self, session: Session, whole_routes: bool):
        """whole_routes: as for `write_rollouts`."""
        self._session, self._whole_routes = session, whole_routes

    def write(self, step: int, groups: Ledger) -> None:
        """A step's rollouts and prompts. Raises RunStopped if they cannot be written."""
        world, run, observer = self._session.world, self._session.run, self._session.observer
        world.on_main(partial(write_rollouts, run.rollouts_path(step), groups.rollouts, self._whole_routes))
        world.on_main(partial(append_step, run.prompts, step, groups.places()))
        if observer.samples_due(step):
            observer.write_samples(step, "rollout/samples", samples_of(step, groups.trained))

    def write_validation(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """A validation's rollouts, after `step`. Raises RunStopped if they cannot be written."""
        session = self._session
        session.world.on_main(partial(write_rollouts, session.run.validation_path(step), rollouts))
        session.observer.write_samples(step, "validation/samples", samples_of(step, rollouts, advantages=False))
