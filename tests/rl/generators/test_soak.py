"""Actors killed and stopped at random moments, again and again: the run that nothing has disturbed, bit for bit."""

import contextlib
import os
import random
import signal
import time
from dataclasses import replace

import pytest

from lockstep.config import ActorsConfig
from tests.rl.generators.conftest import whole_run
from tests.rl.generators.disturbed import Disturbed
from tests.rl.generators.test_colocated import outcome
from tests.rl.generators.test_disturbed import left_over
from tests.rl.processes import is_alive


def actors_of(config):
    return [*(f"generator_{number}" for number in range(config.actors.generators)), "trainer"]


def soak(config, names, strikes, at_once, seed):
    """A run of `config` in which `at_once` of the actors `names` die, `strikes` times; who they were."""
    draw, victims = random.Random(seed), []
    run = Disturbed(config, until=0)
    stopped = []
    for strike in range(strikes):
        run.wait_for_step(strike * (config.steps - 1) // strikes)
        # Each once; then chance decides.
        struck = names[strike * at_once :][:at_once]
        while len(struck) < at_once:
            # A third start in a row that ends before a generator can sample ends the run.
            twice = {victims[-1]} if len(victims) > 1 and victims[-1] == victims[-2] else set()
            struck += {*draw.choices(names, [1 + (name != "trainer") for name in names])} - {*struck} - twice
        pids = [run.wait_for_generator(name) for name in struck if name != "trainer"]
        run.hold((strike + 1) * (config.steps - 1) // strikes)
        for pid in pids:
            number = draw.choice([signal.SIGKILL, signal.SIGSTOP])
            time.sleep(draw.random() * 0.3)
            # On a busy machine the trainer may have given it up by itself.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
            stopped += [pid] if number == signal.SIGSTOP else []
        if "trainer" in struck:
            time.sleep(draw.random() * 0.3)
            os.kill(run.process.pid, signal.SIGKILL)
            run.process.join()
            run.start()
        victims += struck
    run.hold()
    assert run.end() == 0
    assert not any(map(is_alive, stopped)) and not left_over(run.folder)
    return victims


def check(model_folder, tmp_path, steps, actors, kills, at_once, seed):
    (tmp_path / "whole").mkdir()
    config, expected = whole_run(model_folder, tmp_path / "whole", steps)
    config = replace(config, output=str(tmp_path / "run"), actors=actors)
    victims = soak(config, actors_of(config), kills // at_once, at_once, seed)
    assert len(victims) == kills and len(set(victims)) == actors.generators + 1
    found = outcome(tmp_path / "run")
    assert found == expected and len(found[0]) == 1 + config.steps
    assert all(m["parity/tokens_checked"] > 0 and m["parity/tokens_different"] == 0 for m in found[0][1:])


@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_whose_generator_and_trainer_are_killed_has_the_bits_of_one_process(model_folder, tmp_path, tensor):
    actors = ActorsConfig(generators=1, tensor=tensor, threads=1)
    check(model_folder, tmp_path, steps=2, actors=actors, kills=2, at_once=2, seed=0)


@pytest.mark.slow
def test_a_run_survives_forty_kills(model_folder, tmp_path):
    actors = ActorsConfig(generators=2, threads=1)
    check(model_folder, tmp_path, steps=50, actors=actors, kills=40, at_once=1, seed=1)
