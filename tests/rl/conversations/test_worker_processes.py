"""Conversations in worker processes, without a model: whatever one of them does, it costs itself only."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import lockstep.rl as rl
from lockstep.config import RewardConfig
from lockstep.rl.conversations.worker_runner import WorkerConversationRunner, run_tasks, worker_task
from lockstep.rl.environments.loading import EnvironmentSource
from lockstep.rl.grading.exchange import ConversationEnded, ConversationRestarted, ReplyRequest
from lockstep.rl.grading.pool import open_workers
from lockstep.workers.processes import descendants
from tests.rl.grading.misbehaving import CAUSES
from tests.rl.processes import is_alive

TASK = """
import asyncio, os, random
import lockstep.rl as rl
from tests.rl.grading.misbehaving import Misbehaving, kept

class Talk(Misbehaving, rl.ConversationEnvironment):
    def examples(self, split):
        return [rl.Example("p")]

    async def converse(self, example, chat):
        chat.add(example.prompt)
        first = await chat.reply()
        value = getattr(self, example.prompt.split()[0])()
        if asyncio.iscoroutine(value):
            value = await value
        chat.add("again")
        second = await chat.reply()
        chat.seconds["x"] = 0.5
        return {"one": 1.0, "heard": float(first.text == "0" and second.text == "1")} if value is None else value

    async def grade(self, example, episodes):
        value = getattr(self, episodes[0].answer)()
        if asyncio.iscoroutine(value):
            value = await value
        return [float(len(e.messages)) if value is None else value for e in episodes]

    def reward(self, example, completion):
        return {"graded": 1.0}

    async def sleeps(self):
        await asyncio.sleep(1000)

    async def stays(self):
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                pass

    def spins(self):
        while True:
            pass

    def leaks(self):
        for _ in range(20):
            kept.append(bytearray(b"x" * 50_000_000))

    def leaves_a_process_without_a_supervisor(self):
        self.leaves_a_process()
        (left,) = open(f"/proc/self/task/{os.getpid()}/children").read().split()
        open(__file__ + ".left", "w").write(left)
        self.kills_its_supervisor()

    def forges_a_grade(self):
        self.forges("graded", 2, "[]")

    def forges_an_end(self):
        self.forges("ended", 1, "[1]")

    def forges_a_request(self):
        self.forges("asked", 0, "[1, [5]]")

    def says_too_much(self):
        return {"x" * (4 * 10**7): 1.0}

    def draws(self):
        return {"drawn": random.random()}
"""

LIMITS = dict(workers=1, seconds=1.5, memory_gib=0.25, processes=8, output_kib=64)
GOOD = {"one": 1.0, "heard": 1.0}
ALONE = {"kills_its_supervisor", "stops_its_supervisor"}
"""What costs the other conversations a restart."""


@pytest.fixture(scope="module")
def task(tmp_path_factory, checked_at_once):
    file = tmp_path_factory.mktemp("task") / "task.py"
    file.write_text(TASK)
    return file


def opened(task, **changes):
    return open_workers(EnvironmentSource(f"{task}:Talk"), RewardConfig(**(LIMITS | changes)), task.parent)


@pytest.fixture(scope="module")
def workers(task):
    with opened(task) as pool:
        pool.supervisors[0].await_ready()
        yield pool


@pytest.fixture(scope="module")
def patient_workers(task):
    """Those whose time is not up before their memory is, on a busy machine."""
    with opened(task, seconds=20.0) as pool:
        yield pool


def ended(workers, prompts, seeds=None):
    """How each conversation ends, where the model counts its replies."""
    tasks = [worker_task(rl.Example(p, id=str(n)), seeds[n] if seeds else n) for n, p in enumerate(prompts)]
    ends, replies = {}, dict.fromkeys(range(len(prompts)), 0)
    until = time.monotonic() + 60
    with WorkerConversationRunner(tasks, workers) as runner:
        while len(ends) < len(prompts):
            assert time.monotonic() < until, f"only {sorted(ends)} have ended"
            match said := runner.next(wait=True):
                case ReplyRequest():
                    runner.answer(said.number, said.request, rl.Reply(str(replies[said.number])))
                    replies[said.number] += 1
                case ConversationRestarted():
                    replies[said.number] = 0
                case ConversationEnded():
                    assert said.number not in ends
                    ends[said.number] = said
    return [ends[number] for number in range(len(prompts))]


def test_bad_conversations_fail_alone_and_say_why(workers, patient_workers):
    bad = {name: cause for name, cause in CAUSES.items() if name not in ALONE and cause != "memory"}
    bad |= dict.fromkeys(("sleeps", "stays", "freezes"), "timeout") | {"says_too_much": "invalid"}
    memory = dict.fromkeys(("takes_memory", "leaks"), "memory")
    for pool, causes in ((workers, bad), (patient_workers, memory)):
        prompts = [text for name in causes for text in ("fine", name)]
        found = ended(pool, prompts)
        assert all(end.outcome.rewards == GOOD and end.seconds == {"x": 0.5} for end in found[::2]), "heard and timed"
        ends = dict(zip(causes, found[1::2]))
        assert {name: end.outcome.cause for name, end in ends.items()} == causes
        for name, end in ends.items():
            assert f"example {prompts.index(name)}" in end.outcome.message
            assert name != "blocks" or "task.py:" in end.outcome.message, "by its line"
            assert end.messages[0] == {"role": "user", "content": name}, "what was known of it is kept"


def test_messages_that_are_forged_cost_the_forger_alone(task):
    with opened(task) as pool:  # whose tasks have the numbers that the messages name
        ends = ended(pool, ["forges_a_request", "forges_an_end", "forges_a_grade", "fine"])
    assert [end.outcome.cause for end in ends] == ["killed"] * 3 + [""]


@pytest.mark.parametrize("bad", sorted(ALONE))
def test_what_ends_or_stops_its_supervisor_fails_alone_and_the_others_start_again(workers, bad):
    ends = ended(workers, ["fine", "fine", bad, "fine"])
    assert [end.outcome.cause for end in ends] == ["", "", "killed", ""] and "example 2" in ends[2].outcome.message
    assert all(end.outcome.rewards == GOOD for end in ends if not end.outcome.cause)


@pytest.mark.slow
def test_a_supervisor_that_says_nothing_is_started_again(task, monkeypatch):
    monkeypatch.setattr("lockstep.rl.grading.supervisor_process.SILENCE", 4.0)
    monkeypatch.setattr("lockstep.rl.grading.supervisor_process.STOPPED_CHECKS", 10**9)
    with opened(task, seconds=0.5) as pool:
        ends = ended(pool, ["fine", "stops_its_supervisor", "fine"])
    assert [end.outcome.cause for end in ends] == ["", "killed", ""]


def test_grades_that_fail_cost_their_own_group(workers, patient_workers):
    bad = {name: cause for name, cause in CAUSES.items() if cause != "memory"} | {"sleeps": "timeout"}
    for pool, causes in ((workers, bad), (patient_workers, {"leaks": "memory"})):
        names = [text for name in causes for text in ("fine", name)]
        groups = [[rl.Episode([{"role": "assistant", "content": text}])] * 2 for text in names]
        results = run_tasks([worker_task(rl.Example("p", id=str(n)), 0, group) for n, group in enumerate(groups)], pool)
        assert all([o.rewards for o in one.outcomes] == [{"reward": 1.0}] * 2 for one in results[::2])
        for name, one in zip(names[1::2], results[1::2]):
            failed = [one.outcome] * 2 if isinstance(one, ConversationEnded) else one.outcomes
            assert [outcome.cause for outcome in failed] == [causes[name]] * 2 and "grade" in failed[0].message


def test_many_conversations_wait_for_the_model_at_once_and_no_more_than_may(task):
    with opened(task, concurrent=3) as pool:
        pool.supervisors[0].await_ready()
        before = set(descendants(os.getpid()))
        tasks = [worker_task(rl.Example("fine"), n) for n in range(40)]
        with WorkerConversationRunner(tasks, pool) as runner:
            asked = [runner.next(wait=True) for _ in range(12)]
            assert len({said.number for said in asked}) == 12
            time.sleep(0.2)
            assert runner.next(wait=False) is None, "the others wait for one of these to end"
            assert len(set(descendants(os.getpid())) - before) == 12
        assert set(descendants(os.getpid())) <= before, "what has not ended is ended on leaving"
        assert [end.outcome.rewards for end in ended(pool, ["fine"] * 40)] == [GOOD] * 40


def test_what_a_conversation_leaves_behind_ends_with_it_and_not_with_others(workers):
    before = set(descendants(os.getpid()))
    tasks = [worker_task(rl.Example(prompt), 0) for prompt in ("leaves_a_process", "leaves_a_process", "fine")]
    with WorkerConversationRunner(tasks, workers) as runner:
        waiting = [runner.next(wait=True) for _ in tasks]
        assert {said.number for said in waiting} == {0, 1, 2}
        for number in (0, 1):
            runner.answer(number, 1, rl.Reply("0"))
        assert {runner.next(wait=True).number for _ in range(2)} == {0, 1}
        assert len(set(descendants(os.getpid())) - before) == 5, "each of two has a process of its own"
        runner.answer(0, 2, rl.Reply("1"))
        assert isinstance(runner.next(wait=True), ConversationEnded)
        assert len(set(descendants(os.getpid())) - before) == 3


def test_what_a_conversation_leaves_behind_ends_with_its_supervisor_even_when_that_is_killed(task, workers):
    assert ended(workers, ["leaves_a_process_without_a_supervisor"])[0].outcome.cause == "killed"
    assert not is_alive(int(Path(f"{task}.left").read_text()))


def test_rewards_and_conversations_end_with_the_trainer_even_when_it_is_killed(task, tmp_path):
    script = f"""
import os
from pathlib import Path
import lockstep.rl as rl
from lockstep.config import RewardConfig
from lockstep.rl.conversations.worker_runner import WorkerConversationRunner, worker_task
from lockstep.rl.environments.loading import EnvironmentSource
from lockstep.rl.grading.pool import open_workers
from lockstep.workers.processes import descendants
source, limits = EnvironmentSource(r"{task}:Talk"), RewardConfig(workers=1, seconds=900)
with open_workers(source, limits, Path(r"{tmp_path}")) as workers:
    workers([(rl.Example("p"), "fine")])
    tasks = [worker_task(rl.Example(prompt), 0) for prompt in ("leaves_a_process", "spins")]
    with WorkerConversationRunner(tasks, workers) as held:
        for _ in range(3):
            said = held.next(wait=True)
            held.answer(said.number, said.request, rl.Reply("0")) if said.request == 1 else None
        print(*descendants(os.getpid()), flush=True)
        held.next(wait=True)
"""
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    below = [int(process) for process in trainer.stdout.readline().split()]
    assert len(below) == 5, "a supervisor, a worker for rewards, two conversations, and what one of them has left"
    trainer.kill()
    trainer.wait()
    until = time.monotonic() + 60
    while any(map(is_alive, below)):
        assert time.monotonic() < until, "they outlive the trainer"
        time.sleep(0.02)


def test_a_conversation_reaches_no_worker_that_grades(workers):
    assert workers([(rl.Example("p"), "fine")])[0].rewards == {"graded": 1.0}
    supervisor_and_worker = set(descendants(os.getpid()))
    assert ended(workers, ["writes_into_pipes"])[0].outcome.cause == "killed"
    assert workers([(rl.Example("p"), "fine")])[0].rewards == {"graded": 1.0}
    assert set(descendants(os.getpid())) == supervisor_and_worker, "no worker had to be replaced"


def test_a_conversation_that_forks_and_returns_twice_ends_once(workers):
    assert [end.outcome.rewards for end in ended(workers, ["returns_twice", "fine"] * 3)] == [GOOD] * 6


def test_random_numbers_are_those_of_the_seed(workers):
    drawn = [
        [end.outcome.rewards["drawn"] for end in ended(workers, ["draws"] * 3, seeds)]
        for seeds in ([1, 2, 1], [1, 2, 3])
    ]
    assert drawn[0][:2] == drawn[1][:2] and drawn[0][0] == drawn[0][2] != drawn[0][1]
