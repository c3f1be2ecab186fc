"""A rank that stops is named, with its step and phase, and leaves behind what there is to see."""

import json
import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

from lockstep.observe.actors import held_up_by, read_actors
from lockstep.observe.heartbeat import Heartbeat
from lockstep.observe.logs import open_logs
from lockstep.observe.run_folder import open_run
from lockstep.observe.timeline import Timeline
from lockstep.observe.watchdog import EXIT_CODE, Watchdog
from tests.parallel.launch import CONTEXT, free_port, ranks_environment

SECONDS = 2.0
"""Several times what a loaded machine needs for one of these steps."""


def _train(run, rank, port, how, stops):
    """Sums over both ranks in each step, until one of them stops in step 3."""
    sys.stderr = (run / f"terminal_{rank}.txt").open("w", buffering=1)
    os.environ |= {"TORCH_FR_BUFFER_SIZE": "100", **ranks_environment(rank, 2, port)}
    dist.init_process_group("gloo")
    timeline = Timeline(rank)
    heartbeat = Heartbeat(run, f"rank_{rank}", timeline, SECONDS / 10)
    with open_logs(run, rank, 2), heartbeat, Watchdog(heartbeat, rank, 2, SECONDS):
        for step in range(1, 100):
            timeline.begin(step)
            with timeline.span("forward"):
                if rank == stops and step == 3:
                    if how == "frozen":
                        os.kill(os.getpid(), signal.SIGSTOP)
                    time.sleep(60)
                if how == "asleep in the phase of the others":
                    dist.all_reduce(torch.ones(1))
            with timeline.span("backward"):
                dist.all_reduce(torch.ones(1))


@pytest.fixture
def begin():
    """Starts processes, which are killed in the end."""
    started = []

    def start(function, *arguments):
        started.append(CONTEXT.Process(target=function, args=arguments, daemon=True))
        started[-1].start()
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.mark.parametrize(
    "how",
    ["frozen", *(pytest.param(how, marks=pytest.mark.slow) for how in ("asleep", "asleep in the phase of the others"))],
)
def test_the_rank_that_stopped_is_named(tmp_path, begin, how):
    port = free_port()
    processes = [begin(_train, tmp_path, rank, port, how, 1) for rank in (0, 1)]
    processes[0].join(60)
    assert processes[0].exitcode == EXIT_CODE
    log = (tmp_path / "logs" / "rank_0.log").read_text()
    assert "rank 1 stopped in step 3, in forward" in log and "rank 0 stopped" not in log
    assert ("does not answer" in log) == (how == "frozen")
    assert "all_reduce" in (tmp_path / "logs" / "stacks_rank_0.txt").read_text()
    collectives = json.loads((tmp_path / "logs" / "collectives_rank_0.json").read_text())["entries"]
    assert collectives[-1]["profiling_name"] == "gloo:all_reduce"
    if how != "frozen":
        processes[1].join(60)
        assert processes[1].exitcode == EXIT_CODE
        assert "in _train" in (tmp_path / "logs" / "stacks_rank_1.txt").read_text()
        actors = list(read_actors(tmp_path).values())
        assert [actor.name for actor in held_up_by(actors, actors)] == ["rank_1"], "also once all have ended"
        assert "stopped" not in (tmp_path / "terminal_1.txt").read_text(), "rank 0 has said it"


@pytest.mark.slow
def test_the_terminal_is_told_by_rank_1_that_rank_0_has_stopped(tmp_path, begin):
    port = free_port()
    processes = [begin(_train, tmp_path, rank, port, "frozen", 0) for rank in (0, 1)]
    processes[1].join(60)
    assert processes[1].exitcode == EXIT_CODE
    assert "CRITICAL: rank 1: rank 0 stopped in step 3" in (tmp_path / "terminal_1.txt").read_text()


def test_a_run_that_makes_progress_is_not_ended_and_its_files_are_removed(tmp_path):
    timeline = Timeline()
    with Heartbeat(tmp_path, "rank_0", timeline, 0.05) as heartbeat, Watchdog(heartbeat, 0, 2, 0.5):
        for step in range(8):
            timeline.begin(step)
            time.sleep(0.1)
    assert not list((tmp_path / "logs").glob("heartbeat*"))


def _generate(run, how):
    timeline = Timeline()
    with Heartbeat(run, "generator_0", timeline, SECONDS / 10):
        if how == "idle":
            with timeline.span("idle", waits_for="requests of rank_0"):
                time.sleep(60)
        with timeline.span("sample"):
            for _ in range(6000):
                time.sleep(0.01)
                timeline.moved()


def _wait_for_rollouts(run, seconds, how):
    timeline = Timeline()
    heartbeat = Heartbeat(run, "rank_0", timeline, SECONDS / 10)
    with open_logs(run, 0, 2), heartbeat, Watchdog(heartbeat, 0, 1, SECONDS):
        timeline.begin(1)
        until = time.monotonic() + seconds
        if how == "idle":
            while time.monotonic() < until:
                time.sleep(0.01)
                timeline.moved()
        with timeline.span("wait", waits_for="rollouts of generator_0"):
            time.sleep(max(0.0, until - time.monotonic()))


def _seen(run, name, condition=lambda actor: True):
    while not ((actor := read_actors(run).get(name)) and condition(actor)):
        time.sleep(0.01)
    return actor


def test_a_process_beside_the_ranks_is_named_where_they_wait_for_it(tmp_path, begin):
    begin(_generate, tmp_path, "frozen")
    os.kill(_seen(tmp_path, "generator_0", lambda actor: actor.phase == "sample").pid, signal.SIGSTOP)
    rank = begin(_wait_for_rollouts, tmp_path, 60, "frozen")
    rank.join(60)
    assert rank.exitcode == EXIT_CODE
    log = (tmp_path / "logs" / "rank_0.log").read_text()
    assert "generator 0 stopped in step 0, in sample" in log and "rank 0 stopped" not in log
    assert "rollouts of generator_0" in log, "what rank 0 waits for"


def test_who_waits_for_one_that_moves_has_not_stopped(tmp_path, begin):
    ranks = {}
    for how in ("moving", "idle"):
        begin(_generate, tmp_path / how, how)
        _seen(tmp_path / how, "generator_0")
        ranks[how] = begin(_wait_for_rollouts, tmp_path / how, 2 * SECONDS, how)
    for how, rank in ranks.items():
        rank.join(60)
        assert rank.exitcode == 0, how


def _stop_itself(run):
    timeline = Timeline()
    with Heartbeat(run, "rank_0", timeline, SECONDS / 10) as heartbeat, Watchdog(heartbeat, 0, 1, SECONDS):
        time.sleep(SECONDS / 4)  # some looks of the watchdog
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(SECONDS / 4)


def test_a_process_is_not_blamed_for_the_time_that_it_was_stopped_itself(tmp_path, begin):
    rank = begin(_stop_itself, tmp_path)
    _seen(tmp_path, "rank_0", lambda actor: actor.process == "stopped")
    time.sleep(SECONDS + 0.5)
    os.kill(rank.pid, signal.SIGCONT)
    rank.join(60)
    assert rank.exitcode == 0


def test_an_error_that_ended_an_actor_is_recorded_until_its_next_run(tmp_path):
    with pytest.raises(ValueError), Heartbeat(tmp_path, "rank_0", Timeline()):
        raise ValueError("no such\nthing")
    actor = read_actors(tmp_path)["rank_0"]
    assert (actor.process, actor.ended) == ("ended", "ValueError: no such")
    open_run(str(tmp_path / "run"), 'output = "x"')
    with pytest.raises(ValueError), Heartbeat(tmp_path / "run", "rank_3", Timeline()):
        raise ValueError
    open_run(str(tmp_path / "run"), 'output = "x"', resume=True)
    assert not read_actors(tmp_path / "run")
