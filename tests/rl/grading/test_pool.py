"""Reward workers: whatever a reward does, it costs its own rollout only."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from lockstep.config import RewardConfig
from lockstep.errors import UserError
from lockstep.rl import Environment, Example, Rollout
from lockstep.rl.environments.loading import EnvironmentSource
from lockstep.rl.grading.pool import SupervisorProcess, open_workers
from lockstep.rl.grading.processes import descendants, is_stopped
from lockstep.rl.rollouts.ledger import Ledger
from lockstep.rl.rollouts.rewards import assign_rewards
from tests.rl.grading.misbehaving import CAUSES

TASK = """
import asyncio, os, signal, time
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
        while True:
            pass

    def leaks(self):
        kept.append(bytearray(b"x" * 50_000_000))

    def prints_some(self):
        print("x")

    def sleeps(self):
        time.sleep(0.001)

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

    def forges(self):
        # As its worker answers, in each pipe: of a forger the trainer believes no cause and no control character.
        import json, struct
        body = json.dumps([[0, {}, "\\x1bcause", "\\x1b[2J"]]).encode()
        for pipe in range(3, 20):
            try:
                os.write(pipe, struct.pack("<I", len(body)) + body)
            except OSError:
                pass
        time.sleep(1000)

class Judged(Task):
    async def reward(self, example, completion):
        if completion == "asleep":
            await asyncio.sleep(1000)
        await asyncio.sleep(0.01)
        return Task.reward(self, example, completion)
"""

LIMITS = dict(workers=2, seconds=3.0, memory_gib=0.25, processes=8, output_kib=64)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    file = tmp_path_factory.mktemp("task") / "task.py"
    file.write_text(TASK)
    return file


@pytest.fixture
def graded(task, tmp_path, monkeypatch):
    """`graded(completions, …)`: the cause of each failure, an empty string for each that has its reward."""
    monkeypatch.setattr("lockstep.rl.grading.pool.CHECK_SECONDS", 0.1)

    def grade(completions, kind="Task", **changes):
        source, limits = EnvironmentSource(f"{task}:{kind}"), RewardConfig(**(LIMITS | changes))
        before = set(descendants(os.getpid()))  # what other tests keep, such as a chat template's process
        with open_workers(source, limits, tmp_path) as grader:
            outcomes = grader([(Example("p", id=str(i)), text) for i, text in enumerate(completions)])
        assert all(o.rewards == {"one": 1.0} for o in outcomes if not o.cause)
        assert set(descendants(os.getpid())) <= before, "no process is left behind"
        return [o.cause for o in outcomes]

    return grade


@pytest.mark.parametrize(("bad", "cause"), [*CAUSES.items(), ("hangs_deaf", "timeout")])
def test_a_bad_reward_fails_alone_and_says_why(graded, bad, cause):
    assert graded(["fine", "fine", bad, "fine", "fine"], workers=1) == ["", "", cause, "", ""]


def test_a_supervisor_that_a_reward_stops_is_given_up_long_before_its_jobs_could_have_ended(graded):
    began = time.monotonic()
    assert graded(["fine", "stops_its_supervisor"], workers=1) == ["", "killed"]
    assert time.monotonic() < began + 60, "the trainer gives two jobs 80 s, and the one at fault 70 s more"


def test_a_supervisor_is_given_up_where_several_looks_in_a_row_find_it_stopped(task, tmp_path):
    source, limits = EnvironmentSource(f"{task}:Task"), RewardConfig(**LIMITS | {"workers": 1})
    with open_workers(source, limits, tmp_path) as grader:
        (supervisor,) = grader.supervisors
        supervisor.await_ready()
        assert supervisor.process

        def gets(sent, stopped):
            os.kill(supervisor.process.pid, sent)
            until = time.monotonic() + 60
            while is_stopped(supervisor.process.pid) != stopped:
                assert time.monotonic() < until
                time.sleep(0.01)

        gets(signal.SIGSTOP, stopped=True)
        assert [supervisor.stays_stopped() for _ in range(2)] == [False, False]
        supervisor.is_grading = True
        assert grader.awaited() == "reward worker 0, which a signal has stopped"
        gets(signal.SIGCONT, stopped=False)
        assert not supervisor.stays_stopped()
        assert grader.awaited() == "reward worker 0"
        gets(signal.SIGSTOP, stopped=True)
        assert [supervisor.stays_stopped() for _ in range(3)] == [False, False, True]
        gets(signal.SIGCONT, stopped=False)
        assert grader([(Example("p"), "fine")])[0].rewards == {"one": 1.0}
        assert grader.awaited() == ""


def test_a_reward_that_leaks_fails_nothing_before_the_limit_and_not_its_neighbours(graded):
    # 50 MB each and 256 MiB for all: a worker is replaced before its neighbours miss what one has kept.
    assert graded(["leaks"] * 12 + ["fine"] * 4, workers=1) == [""] * 16


def test_a_reward_that_forks_and_returns_twice_is_answered_once(task, tmp_path):
    source, limits = EnvironmentSource(f"{task}:Task"), RewardConfig(**LIMITS | {"workers": 1})
    with open_workers(source, limits, tmp_path) as grader:
        for _ in range(5):  # a second answer would be taken for that of the next one
            assert grader([(Example("p"), "returns_twice")])[0].rewards == {"one": 1.0}
            assert grader([(Example("p"), "raises")])[0].cause == "raised"


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        pytest.param("asleep", "timeout", marks=pytest.mark.slow),
        ("blocks", "timeout"),
        ("raises", "raised"),
        ("exits", "raised"),
        ("kills_itself", "killed"),
    ],
)
def test_of_coroutines_that_run_together_only_the_bad_one_fails(graded, bad, cause):
    assert graded(["fine"] * 5 + [bad] + ["fine"] * 5, "Judged") == [""] * 5 + [cause] + [""] * 5


def test_a_worker_that_forges_an_answer_forges_no_cause_and_no_terminal(task, tmp_path):
    source, limits = EnvironmentSource(f"{task}:Task"), RewardConfig(**LIMITS | {"workers": 1})
    with open_workers(source, limits, tmp_path) as grader:
        outcome = grader([(Example("p"), "forges")])[0]
    assert (outcome.cause, outcome.message) == ("killed", r"\x1b[2J")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has a file that is always full")
def test_a_full_disk_costs_the_log_alone(task, tmp_path):
    source, limits = EnvironmentSource(f"{task}:Task"), RewardConfig(**LIMITS | {"workers": 1})
    log = tmp_path / "rewards_0.log"
    log.symlink_to("/dev/full")
    with open_workers(source, limits, tmp_path) as grader:
        assert grader([(Example("p"), "prints_some")])[0].rewards == {"one": 1.0}
        assert log.is_symlink(), "a supervisor that is started again makes another log"


def test_a_log_that_is_deleted_during_the_run_fails_nothing(task, tmp_path):
    source, limits = EnvironmentSource(f"{task}:Task"), RewardConfig(**LIMITS | {"workers": 1})
    with open_workers(source, limits, tmp_path) as grader:
        grader([(Example("p"), "fine")])
        (tmp_path / "rewards_0.log").unlink()


BAD = dict(
    raises=("raised", 6), kills_itself=("killed", 4), takes_memory=("memory", 4), prints=("output", 3),
    forks=("processes", 2), blocks=("timeout", 1),
)  # fmt: skip
"""Of every 100 rewards."""


def test_quick_rewards_are_sent_in_few_messages_and_slow_ones_in_more(task, tmp_path, monkeypatch):
    sizes = []
    ask = SupervisorProcess._request
    monkeypatch.setattr(
        SupervisorProcess,
        "_request",
        lambda self, jobs, message: (sizes.append(len(jobs)), ask(self, jobs, message))[1],
    )

    def sizes_of(grader, kind, count):
        sizes.clear()
        outcomes = grader([(Example("p"), kind)] * count)
        assert [o.rewards for o in outcomes] == [{"one": 1.0}] * count
        return sizes

    source, limits = EnvironmentSource(f"{task}:Task"), RewardConfig(**LIMITS)
    with open_workers(source, limits, tmp_path) as grader:
        with monkeypatch.context() as busy:
            busy.setattr("lockstep.rl.grading.pool.QUICK_SECONDS", 60.0)  # other work may keep a worker waiting
            assert sizes_of(grader, "fine", 200)[0] == 64, "nothing is known about their time"
            assert sizes_of(grader, "fine", 200) == [100, 100], "as many for each worker"
            assert sizes_of(grader, "fine", 700)[:2] == [256, 256]
        sizes_of(grader, "sleeps", 200)  # a worker's first message may have as many as the last ones
        assert max(sizes_of(grader, "sleeps", 200)) <= 64


def test_messages_that_would_be_long_are_several(task, tmp_path, monkeypatch):
    monkeypatch.setattr("lockstep.rl.grading.pool.MESSAGE_BYTES", 2**14)
    sizes, ask = [], SupervisorProcess._request
    monkeypatch.setattr(
        SupervisorProcess,
        "_request",
        lambda self, jobs, message: (sizes.append(len(jobs)), ask(self, jobs, message))[1],
    )
    source, limits = EnvironmentSource(f"{task}:Task"), RewardConfig(**LIMITS | {"workers": 1})
    with open_workers(source, limits, tmp_path) as grader:
        outcomes = grader([(Example("p" * 2**13 * size), "fine") for size in (1, 1, 1, 4)])
    assert [o.rewards for o in outcomes] == [{"one": 1.0}] * 4 and sizes == [1, 1, 1, 1]


def test_a_coroutine_that_ends_its_worker_costs_those_that_were_with_it_alone(task, tmp_path, monkeypatch):
    monkeypatch.setattr("lockstep.rl.grading.pool.QUICK_SECONDS", 60.0)
    source, limits = EnvironmentSource(f"{task}:Judged"), RewardConfig(**LIMITS | {"workers": 1})
    with open_workers(source, limits, tmp_path) as grader:
        grader([(Example("p"), "fine")] * 256)  # then they are known to be quick
        outcomes = grader([(Example("p"), "exits_at_once" if place == 3 else "is_counted") for place in range(256)])
    assert [place for place, outcome in enumerate(outcomes) if outcome.cause] == [3]
    assert len({*Path(f"{task}.workers").read_text().split()}) < 2 * 64, "each suspect has a worker of its own"


def test_what_others_print_is_not_held_against_a_reward(task, tmp_path):
    source, limits = EnvironmentSource(f"{task}:Task"), RewardConfig(**LIMITS | {"workers": 1})
    with open_workers(source, limits, tmp_path) as grader:
        assert not [o.cause for o in grader([(Example("p"), "prints_its_share")] * 200) if o.cause]


def test_long_answers_of_one_message_are_each_given_once(task, tmp_path):
    source, limits = EnvironmentSource(f"{task}:Task"), RewardConfig(**LIMITS | {"workers": 1})
    Path(f"{task}.calls").unlink(missing_ok=True)
    with open_workers(source, limits, tmp_path) as grader:
        outcomes = grader([(Example("p"), "tells_much")] * 500)
    assert all(len(outcome.rewards) == 81 for outcome in outcomes)
    assert Path(f"{task}.calls").stat().st_size == 500


@pytest.mark.parametrize("hundreds", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_of_many_rewards_the_fifth_that_is_bad_fails_and_no_other(graded, task, tmp_path, hundreds):
    kinds = [kind for kind, (_, count) in BAD.items() for _ in range(count * hundreds)]
    completions = ["fine"] * 100 * hundreds
    for place, kind in enumerate(kinds):
        completions[place * 37 % len(completions)] = kind  # 37 shares no factor with it: every place is another
    expected = [BAD[text][0] if text in BAD else "" for text in completions]
    assert Counter(expected)[""] == 80 * hundreds
    rollouts = [Rollout(Example("p"), i // 5, [1], [2], [-0.5], "stop", text, 0) for i, text in enumerate(completions)]
    limits = RewardConfig(**LIMITS | {"seconds": 2.0})
    with open_workers(EnvironmentSource(f"{task}:Task"), limits, tmp_path) as grader:
        assign_rewards(rollouts, Environment(), limits, grader)
    assert [r.scores.failure for r in rollouts] == expected
    groups = 20 * hundreds
    ledger = Ledger(groups)
    ledger.add(rollouts, range(groups))
    ledger.drop_failed()
    trained = ledger.trained
    whole = [members for members in zip(*[iter(expected)] * 5) if members.count("") >= 2]
    assert len(trained) == sum(members.count("") for members in whole), "every good one of a group that is left"
    metrics = ledger.metrics(trained)
    assert metrics["groups/trained"] == len(whole) == groups - metrics.get("groups/dropped/failed_rewards", 0)


def test_workers_end_with_the_trainer_even_when_it_is_killed(task, tmp_path):
    script = f"""
import os, sys, threading
from pathlib import Path
from lockstep.config import RewardConfig
from lockstep.rl import Environment, Example, Rollout
from lockstep.rl.environments.loading import EnvironmentSource, EnvironmentSource
from lockstep.rl.grading.processes import descendants
from lockstep.rl.grading.pool import open_workers
source, limits = EnvironmentSource("{task}:Task"), RewardConfig(workers=1, seconds=900)
with open_workers(source, limits, Path(r"{tmp_path}")) as grader:
    grader([(Example("p"), "fine")])
    print(*descendants(os.getpid()), flush=True)
    grader([(Example("p"), "blocks")])
"""
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout
    below = [int(process) for process in trainer.stdout.readline().split()]
    assert len(below) == 2, "a supervisor and its worker"
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    until = time.monotonic() + 60
    while any(_runs(process) for process in below):
        assert time.monotonic() < until, "supervisor and worker outlive the trainer"
        time.sleep(0.02)


def test_a_job_that_is_suspended_with_all_its_processes_loses_no_reward(task, tmp_path):
    script = f"""
from pathlib import Path
import lockstep.rl.grading.pool as workers
from lockstep.config import RewardConfig
from lockstep.rl import Example
from lockstep.rl.environments.loading import EnvironmentSource
workers._chunk_timeout = lambda config, jobs: 4.0
source, limits = EnvironmentSource("{task}:Task"), RewardConfig(workers=1, seconds=900)
with workers.open_workers(source, limits, Path(r"{tmp_path}")) as grader:
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
        time.sleep(5)  # longer than the trainer would wait
        for process in everyone:
            os.kill(process, signal.SIGCONT)
        assert trainer.communicate(timeout=60) == ("graded\n", None)
    finally:
        trainer.kill()


def _runs(process):
    try:
        return ") Z" not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False


def test_an_environment_that_does_not_load_in_a_worker_is_named(tmp_path):
    (tmp_path / "task.py").write_text("raise ImportError('nothing here')")
    with (
        open_workers(EnvironmentSource(f"{tmp_path / 'task.py'}:Task"), RewardConfig(), tmp_path) as grader,
        pytest.raises(UserError, match="task.py:Task cannot be loaded in a reward worker: .*nothing here"),
    ):
        grader([(Example("p"), "fine")])


def test_metadata_that_json_would_change_is_refused(task, tmp_path):
    source, limits = EnvironmentSource(f"{task}:Task"), RewardConfig(workers=1)
    with open_workers(source, limits, tmp_path) as grader:
        good = Example("p", metadata={"tests": [1, "two", {"three": None}]})
        assert grader([(good, "fine")])[0].rewards == {"one": 1.0}
        with pytest.raises(UserError, match="metadata of example 'p' does not survive a round trip through JSON"):
            grader([(Example("p", metadata={"tests": (1, 2)}), "fine")])


def test_a_worker_needs_no_torch(tmp_path):
    (tmp_path / "task.py").write_text(
        "import sys\nimport lockstep.rl as rl\nclass Task(rl.Environment):\n"
        "    def examples(self, split): return [rl.Example('p')]\n"
        "    def reward(self, example, completion): return {'torch': 'torch' in sys.modules}\n"
    )
    with open_workers(EnvironmentSource(f"{tmp_path / 'task.py'}:Task"), RewardConfig(), tmp_path) as grader:
        assert grader([(Example("p"), "")])[0].rewards == {"torch": 0.0}
