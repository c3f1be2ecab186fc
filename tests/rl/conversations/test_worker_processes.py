"""Conversations in worker processes, without a model: whatever one of them does, it costs itself only."""

import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

import lockstep.rl as rl
from lockstep.config import RewardConfig
from lockstep.rl.conversations.exchange import ConversationEnded, ConversationRestarted, ReplyRequest
from lockstep.rl.conversations.worker_runner import WorkerConversationRunner, run_tasks, worker_task
from lockstep.rl.environments.loading import EnvironmentSource
from lockstep.rl.grading.pool import open_workers
from lockstep.rl.grading.processes import descendants
from tests.rl.grading.misbehaving import CAUSES

TASK = """
import asyncio, json, os, random, signal, struct, time
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

    def freezes(self):
        os.kill(os.getpid(), signal.SIGSTOP)

    def leaks(self):
        for _ in range(20):
            kept.append(bytearray(b"x" * 50_000_000))

    def leaves_a_process_without_a_supervisor(self):
        self.leaves_a_process()
        (left,) = open(f"/proc/self/task/{os.getpid()}/children").read().split()
        open(__file__ + ".left", "w").write(left)
        self.kills_its_supervisor()

    def forges_a_grade(self):
        message = json.dumps(["graded", 2, []]).encode()
        for pipe in range(3, 30):
            try:
                os.write(pipe, struct.pack("<I", len(message)) + message)
            except OSError:
                pass
        time.sleep(1000)

    def says_too_much(self):
        return {"x" * (4 * 10**7): 1.0}

    def draws(self):
        return {"drawn": random.random()}
"""

LIMITS = dict(workers=1, seconds=2.0, memory_gib=0.25, processes=8, output_kib=64)
# Until memory has run out on a busy machine the time must not be up.
SECONDS = defaultdict(lambda: LIMITS["seconds"], memory=20.0)
GOOD = {"one": 1.0, "heard": 1.0}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    file = tmp_path_factory.mktemp("task") / "task.py"
    file.write_text(TASK)
    return file


@pytest.fixture
def workers(task, tmp_path, monkeypatch):
    """`workers(…)`: a context manager of workers, which leaves no process behind. Stopped ones are found at once."""
    monkeypatch.setattr("lockstep.rl.grading.pool.CHECK_SECONDS", 0.1)
    monkeypatch.setattr("lockstep.rl.conversations.worker_runner.CHECK_SECONDS", 0.1)
    opened, before = [], set(descendants(os.getpid()))

    def make(**changes):
        source, limits = EnvironmentSource(f"{task}:Talk"), RewardConfig(**(LIMITS | changes))
        opened.append(open_workers(source, limits, tmp_path))
        return opened[-1].__enter__()

    yield make
    for one in opened:
        one.__exit__(None, None, None)
    assert set(descendants(os.getpid())) <= before, "no process is left behind"


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


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        *CAUSES.items(),
        ("says_too_much", "invalid"),
        ("sleeps", "timeout"),
        ("stays", "timeout"),
        ("spins", "timeout"),
        ("freezes", "timeout"),
        ("leaks", "memory"),
        ("forges_a_grade", "killed"),
    ],
)
def test_a_bad_conversation_fails_alone_and_says_why(workers, bad, cause):
    ends = ended(workers(seconds=SECONDS[cause]), ["fine", "fine", bad, "fine", "fine"])
    assert [end.outcome.cause for end in ends] == ["", "", cause, "", ""]
    assert all(end.outcome.rewards == GOOD and end.seconds == {"x": 0.5} for end in ends if not end.outcome.cause)
    assert "example 2" in ends[2].outcome.message
    assert bad not in ("blocks", "spins") or "task.py:" in ends[2].outcome.message, "by its line"


@pytest.mark.parametrize(
    ("bad", "cause"),
    [*CAUSES.items(), ("sleeps", "timeout"), ("leaks", "memory")],
)
def test_a_grade_that_fails_costs_its_own_group(workers, bad, cause):
    groups = [[rl.Episode([{"role": "assistant", "content": text}])] * 2 for text in ("fine", bad, "fine")]
    tasks = [worker_task(rl.Example("p", id=str(n)), 0, group) for n, group in enumerate(groups)]
    first, second, third = run_tasks(tasks, workers(seconds=SECONDS[cause]))
    assert [[o.rewards for o in one.outcomes] for one in (first, third)] == [[{"reward": 1.0}] * 2] * 2
    failed = [second.outcome] * 2 if isinstance(second, ConversationEnded) else second.outcomes
    assert [outcome.cause for outcome in failed] == [cause] * 2 and "grade" in failed[0].message


@pytest.mark.parametrize("looks", [3, 10**9], ids=["seen to be stopped", "by its silence"])
def test_a_supervisor_that_says_nothing_is_started_again(workers, monkeypatch, looks):
    monkeypatch.setattr("lockstep.rl.conversations.worker_runner.SILENCE", 1.0 if looks > 3 else 10**9)
    monkeypatch.setattr("lockstep.rl.grading.pool.STOPPED_CHECKS", looks)
    ends = ended(workers(seconds=0.5), ["fine", "stops_its_supervisor", "fine"])
    assert [end.outcome.cause for end in ends] == ["", "killed", ""]


def test_many_conversations_wait_for_the_model_at_once_and_no_more_than_may(workers):
    held = workers(concurrent=3)
    before = set(descendants(os.getpid()))
    tasks = [worker_task(rl.Example("fine"), n) for n in range(40)]
    with WorkerConversationRunner(tasks, held) as runner:
        asked = [runner.next(wait=True) for _ in range(12)]
        assert len({said.number for said in asked}) == 12
        time.sleep(0.2)
        assert runner.next(wait=False) is None, "the others wait for one of these to end"
        assert len(set(descendants(os.getpid())) - before) == 12
    assert set(descendants(os.getpid())) <= before, "what has not ended is ended on leaving"
    assert [end.outcome.rewards for end in ended(held, ["fine"] * 40)] == [GOOD] * 40


def test_what_a_conversation_leaves_behind_ends_with_it_and_not_with_others(workers):
    held = workers()
    before = set(descendants(os.getpid()))
    tasks = [worker_task(rl.Example(prompt), 0) for prompt in ("leaves_a_process", "leaves_a_process", "fine")]
    with WorkerConversationRunner(tasks, held) as runner:
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
    assert ended(workers(), ["leaves_a_process_without_a_supervisor"])[0].outcome.cause == "killed"
    assert _is_zombie(int(Path(f"{task}.left").read_text()))


def test_conversations_end_with_the_trainer_even_when_it_is_killed(task, tmp_path):
    script = f"""
import os
from collections import defaultdict
from pathlib import Path
import lockstep.rl as rl
from lockstep.config import RewardConfig
from lockstep.rl.conversations.worker_runner import WorkerConversationRunner, worker_task
from lockstep.rl.environments.loading import EnvironmentSource
from lockstep.rl.grading.processes import descendants
from lockstep.rl.grading.pool import open_workers
source, limits = EnvironmentSource(r"{task}:Talk"), RewardConfig(workers=1, seconds=900)
with open_workers(source, limits, Path(r"{tmp_path}")) as workers:
    tasks = [worker_task(rl.Example(prompt), 0) for prompt in ("leaves_a_process", "spins")]
    with WorkerConversationRunner(tasks, workers) as held:
        for _ in range(3):
            said = held.next(wait=True)
            held.answer(said.number, said.request, rl.Reply("0")) if said.request == 1 else None
        print(*descendants(os.getpid()), flush=True)
        held.next(wait=True)
"""
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout
    below = [int(process) for process in trainer.stdout.readline().split()]
    assert len(below) == 4, "a supervisor, two conversations, and what one of them has left behind"
    trainer.kill()
    trainer.wait()
    until = time.monotonic() + 60
    while any(Path(f"/proc/{process}").exists() and not _is_zombie(process) for process in below):
        assert time.monotonic() < until, "they outlive the trainer"
        time.sleep(0.02)


def _is_zombie(process):
    try:
        return ") Z" in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return True


def test_a_conversation_reaches_no_worker_that_grades(workers):
    held = workers()
    assert held([(rl.Example("p"), "fine")])[0].rewards == {"graded": 1.0}
    supervisor_and_worker = set(descendants(os.getpid()))
    assert ended(held, ["writes_into_pipes"])[0].outcome.cause == "killed"
    assert held([(rl.Example("p"), "fine")])[0].rewards == {"graded": 1.0}
    assert set(descendants(os.getpid())) == supervisor_and_worker, "no worker had to be replaced"


def test_a_conversation_that_forks_and_returns_twice_ends_once(workers):
    held = workers()
    for _ in range(3):
        assert [end.outcome.rewards for end in ended(held, ["returns_twice", "fine"])] == [GOOD] * 2


def test_random_numbers_are_those_of_the_seed(workers):
    held = workers(workers=2)
    drawn = [
        [end.outcome.rewards["drawn"] for end in ended(held, ["draws"] * 3, seeds)] for seeds in ([1, 2, 1], [1, 2, 3])
    ]
    assert drawn[0][:2] == drawn[1][:2] and drawn[0][0] == drawn[0][2] != drawn[0][1]


def test_a_conversation_that_is_ended_keeps_the_messages_that_were_known(workers):
    (end,) = ended(workers(), ["kills_itself"])
    assert end.messages == [{"role": "user", "content": "kills_itself"}]
