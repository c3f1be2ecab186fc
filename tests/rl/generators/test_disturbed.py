"""Generators and trainers that are killed, stopped, asked to end, or come late: the same run, and nothing is left."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.config import ActorsConfig
from tests.parallel.launch import free_port
from tests.rl.generators.disturbed import unfinished
from tests.rl.generators.test_colocated import command, outcome
from tests.rl.processes import command_of, is_alive, running


def left_over(folder):
    """Processes that know the run's folder or write into it, and with them their ports and their memory, which has no
    names; and what it must not leave in its folder."""
    others = [p for p in Path("/proc").glob("[0-9]*") if int(p.name) != os.getpid()]
    found = [p.name for p in others if any(str(folder) in file for file in files_of(p))]
    return found + [str(path) for path in (folder / "logs").glob("*.key")]


def files_of(process):
    """What a process of /proc was started with, and the files that it has open or mapped."""
    try:
        maps = [line.split(maxsplit=5)[5] for line in (process / "maps").read_text().splitlines() if "/" in line]
        opened = [os.readlink(link) for link in (process / "fd").iterdir()]
        return {*command_of(process.name), *maps, *opened}
    except OSError:  # it has ended
        return set()


def wait_until_ended(processes, seconds=2):
    end = time.monotonic() + seconds
    while any(map(is_alive, processes)):
        assert time.monotonic() < end


def joined(run, port, *launcher):
    """`lockstep generator` as a user starts it."""
    key = run.folder / "logs" / "generators.key"
    run.wait(key.is_file)
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "lockstep", "generator", "--trainer", f"127.0.0.1:{port}", "--key", str(key)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_generators_may_die_stop_join_and_leave_during_a_run(disturbed):
    port = free_port()
    run, expected = disturbed(until=2, generators=1, port=port)
    guest = joined(run, port)
    run.wait(lambda: run.step == 0)
    (killed,) = run.generators()["generator_0"]
    os.kill(killed, signal.SIGKILL)
    again = "generator_0 was killed by SIGKILL; restarting it"
    run.wait(lambda: again in run.said and "generator_0 joins" in run.said.split(again)[1])
    run.wait(lambda: run.step == 2 and "generator_1 joins" in run.said)
    (stopped,) = run.generators()["generator_0"]
    os.kill(stopped, signal.SIGSTOP)
    run.hold(4)  # it is asked for samples now, and cannot end them
    run.wait(lambda: "generator_0: it has sent nothing for 1.5 s" in run.said)
    run.wait(lambda: not is_alive(stopped))
    run.wait(lambda: run.step == 4)
    run.hold(6)  # not to its end, which it may reach before the guest leaves
    time.sleep(0.05)
    guest.send_signal(signal.SIGTERM)
    assert guest.wait(60) == 0, guest.stderr.read()
    run.wait(lambda: "generator_1: it received a signal, and leaves" in run.said)
    run.hold()
    assert run.end() == 0
    assert outcome(run.folder) == expected
    assert sum(unfinished(run.said)) > 0 and not left_over(run.folder)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before", "after"])
def test_trainer_and_generators_that_are_killed_together_as_a_checkpoint_is_renamed_change_nothing(disturbed, moment):
    run, expected = disturbed(stall=f"{moment} step_00000003", generators=2)
    run.wait(lambda: not run.stall.is_file() and len(run.generators()) == 2)
    generators = [pid for pids in run.generators().values() for pid in pids]
    os.killpg(run.process.pid, signal.SIGKILL)  # their whole group, the generators too
    run.process.join()
    wait_until_ended(generators)
    checkpoints = run.folder / "checkpoints"
    assert (checkpoints / "step_00000003").is_dir() == (moment == "after")
    assert (checkpoints / "step_00000003.partial").is_dir() == (moment == "before")
    run.start()
    assert run.end() == 0
    assert outcome(run.folder) == expected and not left_over(run.folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "number"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)], ids=lambda value: str(value)
)
def test_any_rank_of_a_generator_may_die_or_stop(disturbed, rank, number):
    run, expected = disturbed(until=1, generators=1, tensor=2)
    run.wait(lambda: run.step == 1)
    ranks = sorted(run.generators()["generator_0"])
    run.hold(3)
    time.sleep(0.05)
    os.kill(ranks[rank], number)
    run.wait(lambda: unfinished(run.said), seconds=2.5)
    run.wait(lambda: not any(map(is_alive, ranks)), seconds=2)
    run.wait(lambda: run.step == 3)
    if number == signal.SIGSTOP:  # and then the trainer too
        ranks = run.generators()["generator_0"]
        os.kill(run.process.pid, signal.SIGKILL)
        wait_until_ended(ranks)
        assert not left_over(run.folder)
        run.process.join()
        run.config = replace(run.config, actors=ActorsConfig(generators=1, threads=1))
        run.start()
    run.hold()
    assert run.end() == 0 and outcome(run.folder) == expected


@pytest.mark.slow
def test_generators_of_two_ranks_under_torchrun_join_and_leave(disturbed):
    port = free_port()
    run, expected = disturbed(until=2, generators=0, port=port)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    first = joined(run, port, *torchrun)
    run.wait(lambda: run.step == 2)
    second = joined(run, port, *torchrun)
    run.wait(lambda: run.said.count(" joins,") == 2)
    run.hold()
    time.sleep(0.05)
    first.send_signal(signal.SIGTERM)
    run.wait(lambda: "generator_0: it received a signal, and leaves" in run.said)
    first.wait(60)
    assert run.end() == 0 and outcome(run.folder) == expected
    assert second.wait(60) == 0, second.stderr.read()
    assert not left_over(run.folder)


@pytest.mark.slow
def test_after_an_error_nothing_of_a_run_is_left(disturbed):
    run, _ = disturbed(environment="Failing", generators=2, port=free_port())
    run.end()
    assert "no reward today" in run.said and not left_over(run.folder)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["SIGINT", "SIGINT to all", "SIGTERM", "SIGINT twice"])
def test_however_a_trainer_is_ended_nothing_is_left_and_it_resumes(disturbed, end):
    twice = end == "SIGINT twice"  # which ends it at once: it would leave a key, as a run that is killed does
    run, expected = disturbed(until=2 if twice else 10**6, generators=2, port=0 if twice else free_port())
    run.wait(lambda: run.step >= 1 + twice)
    generators = [pid for pids in run.generators().values() for pid in pids]
    begun, number = time.monotonic(), getattr(signal, end.split()[0])
    os.killpg(run.process.pid, number) if "all" in end else os.kill(run.process.pid, number)
    if twice:
        run.wait(lambda: "SIGINT: the run saves and ends" in run.said)
        os.kill(run.process.pid, number)
        assert run.end(2) == 128 + number
    assert run.end() != 0 and time.monotonic() - begun < run.config.faults.stop_seconds
    assert ("which is saved" in run.said) != twice
    wait_until_ended(generators)
    assert not left_over(run.folder)
    run.hold()
    run.config = replace(run.config, actors=ActorsConfig(generators=1, threads=1))
    run.start()
    assert run.end() == 0
    assert outcome(run.folder)[1].items() >= expected[1].items() and not left_over(run.folder)


@pytest.mark.slow
def test_torchrun_restarts_a_run_with_its_generators(task, model_folder, tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    plain, again = (command(f"{task}:Vowels", model_folder, tmp_path / name) for name in ("whole", "run"))
    done = subprocess.run(plain, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.count("next:") == 1, "one rank speaks"
    again[5:6] = ["--max-restarts", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    launched = subprocess.Popen([*again, "--actors.generators", "1", "--actors.threads", "1"], env=environment)
    while not (tmp_path / "run" / "checkpoints" / "step_00000002" / "manifest.json").is_file():
        assert launched.poll() is None
        time.sleep(0.02)
    ranks = [pid for pid in running(" rl ", str(tmp_path / "run")) if pid != launched.pid]
    os.kill(max(ranks), signal.SIGKILL)
    assert launched.wait(300) == 0
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole") and not left_over(tmp_path / "run")
