"""Reward workers: whatever a reward does, it costs its own rollout only."""

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from lockstep.config import RewardConfig
from lockstep.errors import UserError
from lockstep.rl import Example
from lockstep.rl.environments.loading import EnvironmentSource
from lockstep.rl.grading.pool import open_workers
from lockstep.workers.processes import descendants
from tests.rl.grading.misbehaving import CAUSES

TASK = """
import asyncio, json, os, signal, sys, time
import lockstep.rl as rl
from tests.rl.grading.misbehaving import Misbehaving, kept

class Task(Misbehaving, rl.Environment):
    def examples(self, split):
        return [rl.Example("p")]

    def reward(self, example, completion):
        value = getattr(self, completion)()
        return {"one": 1.0} if value is None else value

    def hangs_deaf(self):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)

    def leaks(self):
        kept.append(bytearray(b"x" * 50_000_000))

    def imports_torch(self):
        return {"torch": float("torch" in sys.modules)}

    def is_counted(self):
        with open(__file__ + ".workers", "a") as file:
            file.write(f"{os.getpid()}\\n")

    def prints_its_share(self):
        os.write(1, b"x" * 20_000)

    def tells_much(self):
        with open(__file__ + ".calls", "a") as file:
            file.write("x")
        return {"one": 1.0, **{f"{i}: " + "x" * 60: 0.0 for i in range(80)}}

    def waits_for_a_file(self):
        open(__file__ + ".began", "w").close()
        while not os.path.exists(__file__ + ".go"):
            time.sleep(0.01)

    def forges_an_answer(self):
        # Of a forger the trainer believes no cause and no control character.
        self.forges("rewarded", 0, json.dumps([[0, {}, "\\x1bcause", "\\x1b[2J"]]))

class Judged(Task):
    async def reward(self, example, completion):
        if completion == "asleep":
            await asyncio.sleep(1000)
        await asyncio.sleep(0.01)
        return Task.reward(self, example, completion)
"""

LIMITS = dict(workers=1, seconds=1.5, memory_gib=0.25, processes=8, output_kib=64)


@pytest.fixture(scope="module")
def task(tmp_path_factory, checked_at_once):
    file = tmp_path_factory.mktemp("task") / "task.py"
    file.write_text(TASK)
    return file


@pytest.fixture(scope="module")
def opened(task):
    """`opened(kind)`: one pool for the tests of this module."""
    with ExitStack() as pools:

        @cache
        def open_pool(kind="Task"):
            source = EnvironmentSource(f"{task}:{kind}")
            return pools.enter_context(open_workers(source, RewardConfig(**LIMITS), task.parent))

        yield open_pool


def failures(pool, completions):
    """The cause of each failure by its place; the others have their rewards."""
    outcomes = pool([(Example("p", id=str(i)), text) for i, text in enumerate(completions)])
    assert all(o.rewards == {"one": 1.0} for o in outcomes if not o.cause)
    return {place: outcome.cause for place, outcome in enumerate(outcomes) if outcome.cause}


def between_good_ones(names):
    return [text for name in names for text in ("fine", name)] + ["fine"]


def test_bad_rewards_fail_alone_and_say_why(opened):
    began = time.monotonic()
    bad = {**CAUSES, "hangs_deaf": "timeout"}
    found = failures(opened(), between_good_ones(bad))
    assert {name: found.get(2 * place + 1) for place, name in enumerate(bad)} == bad
    assert len(found) == len(bad)
    assert time.monotonic() < began + 60, "a supervisor that was stopped is replaced before its jobs' time is up"


def test_of_coroutines_that_run_together_only_the_bad_ones_fail(opened):
    bad = {"asleep": "timeout", "blocks": "timeout", "raises": "raised", "exits": "raised", "kills_itself": "killed"}
    found = failures(opened("Judged"), between_good_ones(bad))
    assert found == {2 * place + 1: cause for place, cause in enumerate(bad.values())}


def test_a_coroutine_that_ends_its_worker_costs_those_that_were_with_it_alone(opened, task):
    completions = ["exits_at_once" if place == 3 else "is_counted" for place in range(256)]
    assert failures(opened("Judged"), completions) == {3: "killed"}
    assert len({*Path(f"{task}.workers").read_text().split()}) < 2 * 64, "each suspect has a worker of its own"


def test_a_reward_that_leaks_fails_nothing_before_the_limit_and_not_its_neighbours(opened):
    # 50 MB each and 256 MiB for all: a worker is replaced before its neighbours miss what one has kept.
    assert failures(opened(), ["leaks"] * 12 + ["fine"] * 4) == {}


def test_a_reward_that_forks_and_returns_twice_is_answered_once(opened):
    for _ in range(3):  # a second answer would be taken for that of the next one
        assert failures(opened(), ["returns_twice"]) == {}
        assert failures(opened(), ["raises"]) == {0: "raised"}


def test_a_worker_that_forges_an_answer_forges_no_cause_and_no_terminal(task, tmp_path):
    with open_workers(EnvironmentSource(f"{task}:Task"), RewardConfig(**LIMITS), tmp_path) as pool:
        (outcome,) = pool([(Example("p"), "forges_an_answer")])
    assert (outcome.cause, outcome.message) == ("killed", r"\x1b[2J")


def test_what_others_print_is_not_held_against_a_reward(opened):
    assert failures(opened(), ["prints_its_share"] * 200) == {}


def test_long_answers_of_one_message_are_each_given_once(opened, task):
    outcomes = opened()([(Example("p"), "tells_much")] * 500)
    assert all(len(outcome.rewards) == 81 for outcome in outcomes)
    assert Path(f"{task}.calls").stat().st_size == 500


LENGTHS = """
import time
import lockstep.rl as rl

class Lengths(rl.Environment):
    def examples(self, split):
        return [rl.Example("p")]

    def reward(self, example, completion):
        time.sleep(0.1)
        return len(completion)
"""


def rewards_of(pool, completions):
    return [outcome.rewards["reward"] for outcome in pool([(Example("p"), text) for text in completions])]


def test_every_completion_has_its_own_reward_after_an_interrupted_call_and_in_messages_of_any_size(
    tmp_path, monkeypatch
):
    def interrupt(*_):
        raise InterruptedError

    (tmp_path / "task.py").write_text(LENGTHS)
    monkeypatch.setattr("lockstep.rl.grading.pool.MESSAGE_BYTES", 100)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        source = EnvironmentSource(f"{tmp_path / 'task.py'}:Lengths")
        with open_workers(source, RewardConfig(workers=1), tmp_path) as pool:
            assert rewards_of(pool, ["x"]) == [1]
            signal.setitimer(signal.ITIMER_REAL, 0.15)
            with pytest.raises(InterruptedError):
                rewards_of(pool, ["x" * length for length in range(2, 12)])
            time.sleep(0.3)
            signal.setitimer(signal.ITIMER_REAL, 20)  # a job that is lost would be waited for without an end
            assert rewards_of(pool, ["x" * length for length in range(60, 64)]) == [60, 61, 62, 63]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_worker_needs_no_torch(opened):
    assert opened()([(Example("p"), "imports_torch")])[0].rewards == {"torch": 0.0}


def test_metadata_that_json_would_change_is_refused(opened):
    good = Example("p", metadata={"tests": [1, "two", {"three": None}]})
    assert opened()([(good, "fine")])[0].rewards == {"one": 1.0}
    with pytest.raises(UserError, match="metadata of example 'p' does not survive a round trip through JSON"):
        opened()([(Example("p", metadata={"tests": (1, 2)}), "fine")])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has a file that is always full")
def test_a_full_disk_or_a_deleted_log_costs_the_log_alone(task, tmp_path):
    log = tmp_path / "rewards_0.log"
    log.symlink_to("/dev/full")
    with open_workers(EnvironmentSource(f"{task}:Task"), RewardConfig(**LIMITS), tmp_path) as pool:
        assert failures(pool, ["prints_its_share"]) == {}
        assert log.is_symlink(), "a supervisor that is started again makes another log"
        log.unlink()
        assert failures(pool, ["prints_its_share"]) == {}


def test_a_job_that_is_suspended_with_all_its_processes_loses_no_reward(task, tmp_path):
    script = f"""
from pathlib import Path
from lockstep.config import RewardConfig
from lockstep.rl import Example
from lockstep.rl.environments.loading import EnvironmentSource
from lockstep.rl.grading import pool, supervisor_process
supervisor_process.SILENCE = 2.0 - 900
source, limits = EnvironmentSource("{task}:Task"), RewardConfig(workers=1, seconds=900)
with pool.open_workers(source, limits, Path(r"{tmp_path}")) as grader:
    print(grader([(Example("p"), "waits_for_a_file")])[0].cause or "graded", flush=True)
"""
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 60
        while not Path(f"{task}.began").exists():
            assert time.monotonic() < until
            time.sleep(0.02)
        everyone = [trainer.pid, *descendants(trainer.pid)]
        for process in everyone:
            os.kill(process, signal.SIGSTOP)
        Path(f"{task}.go").touch()
        time.sleep(2.5)  # longer than the trainer would wait
        for process in everyone:
            os.kill(process, signal.SIGCONT)
        assert trainer.communicate(timeout=60) == ("graded\n", None)
    finally:
        trainer.kill()


def test_an_environment_that_does_not_load_in_a_worker_is_named(tmp_path):
    (tmp_path / "task.py").write_text("raise ImportError('nothing here')")
    with (
        open_workers(EnvironmentSource(f"{tmp_path / 'task.py'}:Task"), RewardConfig(), tmp_path) as grader,
        pytest.raises(UserError, match="task.py:Task cannot be loaded in a reward worker: .*nothing here"),
    ):
        grader([(Example("p"), "fine")])
