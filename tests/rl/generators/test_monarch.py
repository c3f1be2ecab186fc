"""Generators that Monarch workers start: the same run, whatever dies, and nothing is left on their host."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.config import ActorsConfig
from lockstep.config.validation import validate
from lockstep.errors import UserError
from lockstep.rl.generators.ranks import Group, start_stand_in
from lockstep.rl.generators.supervisor import require_workers
from lockstep.rl.reinforce import reinforce
from tests.parallel.launch import free_port
from tests.rl.generators.test_colocated import config_of, outcome
from tests.rl.processes import is_alive, running

WORKER = "from monarch.actor import run_worker_loop_forever as run; run(address='{}', ca='trust_all_connections')"


class Worker:
    """A Monarch worker as on another host: in another folder, and no child of the trainer."""

    def __init__(self, folder):
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.folder = folder
        self.mark = f"WORKER_OF_A_TEST={self.address}".encode()
        self.start()

    def start(self):
        name, value = self.mark.decode().split("=")
        environment = os.environ | {name: value, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", WORKER.format(self.address)]
        self.process = subprocess.Popen(command, cwd=self.folder, env=environment, start_new_session=True)

    def below(self, word=""):
        """The processes on its host that it has started, of those with `word` in their command."""
        found = []
        for pid in running(word):
            with suppress(OSError):  # it has ended, or is another user's
                found += [pid] if self.mark in Path(f"/proc/{pid}/environ").read_bytes() else []
        return [pid for pid in found if pid != self.process.pid]

    def generator(self):
        (found,) = self.below("generator_0")
        return found

    def wait_until_nothing_is_left(self, run=None, seconds=15):
        """Neither of what it has started, nor of what stands for it beside the trainer of `run`."""
        until = time.monotonic() + seconds
        while left := self.below() + (running("monarch_stand_in", str(run.folder)) if run else []):
            assert time.monotonic() < until, left
            time.sleep(0.02)

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def worker(tmp_path):
    pytest.importorskip("monarch")
    (tmp_path / "there").mkdir()
    worker = Worker(tmp_path / "there")
    yield worker
    for pid in [worker.process.pid, *worker.below()]:
        os.kill(pid, signal.SIGKILL)
    worker.process.wait()


@pytest.mark.slow
def test_a_run_with_tensor_groups_on_another_host_and_on_its_own_is_the_same(disturbed, worker):
    run, expected = disturbed(until=1, generators=2, tensor=2, hosts=(worker.address, "local"))
    run.wait(lambda: run.step == 1)
    assert len(worker.below("generator_0")) == 2 and not worker.below("generator_1")
    run.hold()
    assert run.end() == 0
    assert outcome(run.folder) == expected
    logs = run.folder / "logs"
    assert "generator_0 samples for process" in (logs / "generator_0.log").read_text()
    assert (logs / "generator_0_rank_1.log").is_file() and not list(logs.glob("*.key"))
    worker.wait_until_nothing_is_left(run)
    assert worker.process.poll() is None, "it serves the next run"


@pytest.mark.slow
def test_a_run_survives_the_death_of_generator_actor_stand_in_and_worker(disturbed, worker):
    run, expected = disturbed(until=0, generators=1, hosts=(worker.address,))

    def killed(step, number, *pids):
        run.wait(lambda: run.step == step)
        before = worker.generator()
        run.hold(step + 1)
        for pid in pids or [before]:
            os.kill(pid, number)
        return before

    killed(0, signal.SIGKILL)
    run.wait(lambda: "; restarting it" in run.said, 10)
    run.wait(lambda: run.step == 1)
    (actor,) = worker.below("bootstrap_main")
    generator = killed(1, signal.SIGKILL, actor)
    run.wait(lambda: not is_alive(generator), 1)
    run.wait(lambda: run.step == 2)
    # A generator that hears nothing any more, and nobody here who would end it.
    generator = worker.generator()
    os.kill(generator, signal.SIGSTOP)
    killed(2, signal.SIGKILL, *running("monarch_stand_in", str(run.folder)))
    run.wait(lambda: not is_alive(generator), 15)
    run.wait(lambda: run.step == 3)
    worker.kill()
    worker.wait_until_nothing_is_left(seconds=2)
    run.hold()
    worker.start()
    assert run.end() == 0
    assert outcome(run.folder) == expected
    worker.wait_until_nothing_is_left(run)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_however_the_trainer_ends_nothing_is_left_on_the_other_host(disturbed, worker, number):
    run, _ = disturbed(until=1, generators=1, hosts=(worker.address,))
    run.wait(lambda: run.step == 1)
    generator = worker.generator()
    if number == signal.SIGKILL:
        os.kill(generator, signal.SIGSTOP)  # it cannot hear of the trainer's end
    run.hold()
    os.killpg(run.process.pid, number)
    assert run.end() != 0
    worker.wait_until_nothing_is_left(run)
    assert not is_alive(generator)


def test_a_worker_that_cannot_be_reached_is_named_within_its_time(task, model_folder, tmp_path):
    pytest.importorskip("monarch")
    address = f"tcp://127.0.0.1:{free_port()}"
    actors = ActorsConfig(generators=1, hosts=(address,), start_seconds=1)
    begun = time.monotonic()
    with pytest.raises(UserError, match=f"no Monarch worker can be reached at {address}: .*refused"):
        reinforce(config_of(task, model_folder, tmp_path / "run", actors=actors))
    assert time.monotonic() - begun < 10
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_process_that_is_no_monarch_worker_is_named_in_the_log(tmp_path):
    pytest.importorskip("monarch")
    log = tmp_path / "log"
    with socket.create_server(("127.0.0.1", 0)) as server, log.open("ab") as output:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        process = start_stand_in(address, "127.0.0.1", Group([], 1, 1, 1), "", [log], output)
        assert process.wait(60) == 1
    assert log.read_text().splitlines()[-1].startswith(f"the Monarch worker at {address}: TimeoutError")


def test_without_monarch_a_run_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "monarch", None)
    with pytest.raises(UserError, match=r"torchmonarch is not installed; pip install 'torchmonarch>=0.7,<0.8'"):
        require_workers(ActorsConfig(generators=1, hosts=("tcp://node1:26600",)))
    require_workers(ActorsConfig(generators=1, hosts=("local",)))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (dict(hosts=("tcp://node1:26600",)), "actors.host is 127.0.0.1, which generators on the host of tcp://node1:2"),
        (dict(hosts=("tcp://node1:26600",), host="0.0.0.0"), "actors.host is 0.0.0.0, which generators"),
        (dict(hosts=("local", "node1:26600"), host="node0"), "'node1:26600' is not tcp://HOST:PORT, tls://HOST:PORT"),
        (dict(hosts=("tcp://node1",), host="node0"), "'tcp://node1' is not tcp://HOST:PORT"),
        (dict(hosts=("local",), generators=0), "actors.generators is 0; give the number"),
    ],
)
def test_impossible_hosts_are_refused_by_name(task, model_folder, tmp_path, settings, said):
    actors = ActorsConfig(**({"generators": 1} | settings))
    with pytest.raises(UserError, match=said):
        validate(config_of(task, model_folder, tmp_path, actors=actors))
    with_address = replace(actors, generators=1, host="10.0.0.1", hosts=("tcp://node1:26600", "tls://[::1]:5", "local"))
    validate(config_of(task, model_folder, tmp_path, actors=with_address))
