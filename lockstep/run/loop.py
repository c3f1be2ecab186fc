"""The loop of every run: pretraining, fine-tuning, preferences, reward models, reinforcement, and a replayed step."""

from __future__ import annotations

from lockstep.checkpoint.random_state import random_state
from lockstep.run.session import Session
from lockstep.run.stop import Interrupted
from lockstep.run.task import Task


def run_steps(task: Task, session: Session) -> None:
    """Makes the steps that are left of a run.

    A signal interrupts a step only before its first update: the run is then saved as of the step before. Later it
    completes with its step. An interrupted validation is pending in the checkpoint, and runs when the run resumes.
    """
    session.begin(task)
    while (step := session.next_step(task)) is not None:
        before = random_state()
        with session.observer.step(step):
            try:
                metrics = task.step(step)
            except Interrupted:
                session.save_interrupted(task, before)
                break
            if session.validates_after(task, step):
                metrics |= session.validate(task, step)
            session.observe(task, step, metrics)
            session.save_if_due(task)
        session.show(task, metrics)
