"""Actors killed and stopped at random moments, again and again: the run that nothing has disturbed, bit for bit."""

import json
import os
import random
import signal
import time
from dataclasses import replace

import pytest

from lockstep.config import ActorsConfig
from tests.rl.actors.conftest import whole_run
from tests.rl.actors.disturbed import Disturbed, is_alive
from tests.rl.actors.test_colocated import outcome
from tests.rl.actors.test_disturbed import left_over


def soak(config, generators, kills, seed):
    """A run of `config` in which so many actors die; their names."""
    draw, victims = random.Random(seed), []
    names = [f"generator_{number}" for number in range(generators)]
    run = Disturbed(replace(config, actors=ActorsConfig(generators=generators, threads=1)), until=0)
    stopped = []
    for kill in range(kills):
        step = kill * (config.steps - 1) // kills
        run.wait_for_step(step)
        # A generator and the trainer first; then chance decides.
        victim = ([names[0], "trainer"][kill:] or draw.choices([*names, "trainer"], [2] * generators + [1]))[0]
        if victim == "trainer":
            pid, number = run.process.pid, signal.SIGKILL
        else:
            pid = run.wait_for_generator(victim)
            number = draw.choice([signal.SIGKILL, signal.SIGSTOP])
        run.hold((kill + 1) * (config.steps - 1) // kills)
        time.sleep(draw.random() * 0.3)
        os.kill(pid, number)
        victims.append(victim)
        if victim == "trainer":
            run.process.join()
            run.start()
        elif number == signal.SIGSTOP:
            stopped.append(pid)
    run.hold()
    assert run.end() == 0
    assert not any(map(is_alive, stopped)) and not left_over(run.folder)
    return victims


def prompts(found):
    return {name: [json.loads(line)["prompt_ids"] for line in text.splitlines()] for name, text in found[1].items()}


def check(whole, tmp_path, generators, kills, seed):
    config, expected = whole
    config = replace(config, output=str(tmp_path / "run"))
    assert len(set(soak(config, generators, kills, seed))) == 1 + generators
    found = outcome(tmp_path / "run")
    assert prompts(found) == prompts(expected)
    assert all(m["parity/tokens_checked"] > 0 and m["parity/tokens_different"] == 0 for m in found[0][1:])
    assert found == expected and len(found[0]) == 1 + config.steps


def test_a_run_outlives_two_kills(whole, tmp_path):
    check(whole, tmp_path, generators=1, kills=2, seed=0)


@pytest.mark.slow
def test_a_run_outlives_forty_kills(model_folder, tmp_path, tmp_path_factory):
    check(whole_run(model_folder, tmp_path_factory.mktemp("whole"), steps=50), tmp_path, generators=2, kills=40, seed=1)
