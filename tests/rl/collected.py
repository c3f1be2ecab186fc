"""Rollouts that a run's settings describe, for tests that need no run."""

from lockstep.rl.grading import InProcessGrader
from lockstep.rl.rollouts.collect import collect, training_params, validation_params


def collected(examples, environment, engine, rendering, config, step=1, extra_round=0, grader=None, **others):
    """numbers: groups to request; None: all."""
    params = training_params(config, environment, rendering)
    seed = [config.seed, step, extra_round]
    return _collect(examples, environment, engine, rendering, config, params, seed, grader, **others)


def held_out(examples, environment, engine, rendering, config):
    params, seed = validation_params(config, environment, rendering)
    return _collect(examples, environment, engine, rendering, config, params, seed, None)


def _collect(examples, environment, engine, rendering, config, params, seed, grader, numbers=None, first=None):
    groups = {n: examples[n] for n in (range(len(examples)) if numbers is None else numbers)}
    grader = grader or InProcessGrader(environment, config.rewards)
    return collect(groups, params, seed, environment, engine, rendering, grader, first)
