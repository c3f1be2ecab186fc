"""A worker process answers, within its limits, and nothing of it is left behind."""

import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import pytest

from lockstep.workers import Closed, Worker, WorkerEnded, from_plain
from lockstep.workers.processes import descendants

ANSWERS = "tests.workers.answering:answers"


@pytest.fixture(scope="module")
def worker():
    return Worker(ANSWERS, b"echo first", seconds=1.0, memory=2**28)


def test_a_worker_answers_and_what_it_prints_is_no_answer(worker):
    assert worker.start() == b"first"
    assert worker.ask(b"echo \xc3\xa9") == "é".encode() and worker.ask(b"prints nonsense") == b"b''"
    large = b"x" * 2**22
    assert worker.ask(b"echo " + large) == large, "more than a pipe holds"


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        pytest.param(b"computes", "it takes more than 1 seconds", marks=pytest.mark.slow),
        (b"takes 512", "its process ended with code 1; out of memory"),
        (b"ends 3", "its process ended with code 3"),
    ],
)
def test_a_worker_that_exceeds_a_limit_or_ends_says_why_and_answers_again(worker, request_, why):
    with pytest.raises(WorkerEnded, match=why):
        worker.ask(request_)
    assert worker.ask(b"echo again") == b"again"


def test_a_worker_that_does_not_start_is_reported_each_time():
    for _ in range(2):
        with pytest.raises(WorkerEnded, match="its process ended with code 1"):
            Worker("tests.workers.answering:broken").ask(b"echo x")


def test_threads_share_one_process_and_a_forked_child_has_its_own(worker):
    first = worker.ask(b"pid")
    answers = {}

    def ask(number):
        for _ in range(20):
            answers.setdefault(number, set()).add(worker.ask(b"echo %d" % number * 1000))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(answers[number]) for number in range(4)] == [1] * 4
    if (child := os.fork()) == 0:
        own = worker.ask(b"pid") != first
        worker.end()
        os._exit(0 if own else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert worker.ask(b"pid") == first, "the child has ended only its own"


def test_an_interrupted_question_is_not_answered_by_the_next(worker):
    def interrupt(*_):
        raise KeyboardInterrupt

    worker.start()
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            worker.ask(b"waits 3")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert worker.ask(b"echo next") == b"next"


def test_a_worker_ends_with_its_object_while_it_answers_and_with_its_parent():
    before = set(descendants(os.getpid()))
    worker = Worker(ANSWERS)
    worker.ask(b"echo x")
    assert len(set(descendants(os.getpid())) - before) == 1
    del worker
    gc.collect()
    assert set(descendants(os.getpid())) <= before

    worker = Worker(ANSWERS)
    worker.start()
    ending = threading.Timer(0.2, worker.end)
    ending.start()
    with pytest.raises(WorkerEnded, match="code -9"):
        worker.ask(b"waits 30")

    script = (
        "import os; from lockstep.workers import Worker; from lockstep.workers.processes import descendants\n"
        f"worker = Worker('{ANSWERS}', seconds=1.0); worker.start(); print(*descendants(os.getpid()), flush=True)\n"
        "worker.ask(b'computes')"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    parent.kill()
    assert parent.communicate(timeout=60)[1] == "", "its child ends in silence, at the limit of its time"
    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{child}"):
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Harm:
    def __reduce__(self):
        return os.system, ("false",)


def test_of_a_workers_pickles_only_plain_types_are_read():
    plain = [1, 2.5, "é", b"\0", None, {"a": (True, [])}]
    assert from_plain(pickle.dumps(plain)) == plain
    for body in (pickle.dumps([Harm()]), pickle.dumps(Harm), pickle.dumps(plain)[:-3], b""):
        with pytest.raises(Closed, match="not a plain pickle"):
            from_plain(body)


def test_nothing_is_imported_from_the_working_folder(tmp_path, monkeypatch):
    for name in ("jinja2", "pickle", "resource", "json"):
        (tmp_path / f"{name}.py").write_text("open('imported', 'w'); raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert Worker(ANSWERS, b"echo x").start() == b"x" and not (tmp_path / "imported").exists()
