"""A rank that stops is named, with its step and phase, and leaves behind what there is to see."""

import json
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from lockstep.observe.actors import held_up_by, read_actors
from lockstep.observe.heartbeat import Heartbeat
from lockstep.observe.run_folder import open_run
from lockstep.observe.timeline import Timeline
from lockstep.observe.watchdog import EXIT_CODE, Watchdog
from tests.parallel.launch import CONTEXT

SECONDS = 2.0
"""Several times what a loaded machine needs for one of these steps."""


def _train(run, rank, port, how):
    """Sums over both ranks in each step, until rank 1 stops in step 3."""
    os.environ |= {"TORCH_FR_BUFFER_SIZE": "100", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo")
    timeline = Timeline(rank)
    from lockstep.observe.logs import open_logs

    heartbeat = Heartbeat(run, f"rank_{rank}", timeline, SECONDS / 10)
    with open_logs(run, rank, 2), heartbeat, Watchdog(heartbeat, rank, 2, SECONDS):
        for step in range(1, 100):
            timeline.begin(step)
            with timeline.span("forward"):
                if rank == 1 and step == 3:
                    if how == "frozen":
                        os.kill(os.getpid(), signal.SIGSTOP)
                    time.sleep(60)
                if how == "asleep in the phase of the others":
                    dist.all_reduce(torch.ones(1))
            with timeline.span("backward"):
                dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    "how",
    ["frozen", *(pytest.param(how, marks=pytest.mark.slow) for how in ("asleep", "asleep in the phase of the others"))],
)
def test_the_rank_that_stopped_is_named(tmp_path, how):
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [CONTEXT.Process(target=_train, args=(tmp_path, rank, port, how), daemon=True) for rank in (0, 1)]
    for process in processes:
        process.start()
    try:
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
    finally:
        for process in processes:
            process.kill()


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
    from lockstep.observe.logs import open_logs

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


def test_a_process_beside_the_ranks_is_named_where_they_wait_for_it(tmp_path):
    generator = CONTEXT.Process(target=_generate, args=(tmp_path, "frozen"), daemon=True)
    rank = CONTEXT.Process(target=_wait_for_rollouts, args=(tmp_path, 60, "frozen"), daemon=True)
    generator.start()
    try:
        while not (actors := read_actors(tmp_path)) or actors["generator_0"].phase != "sample":
            time.sleep(0.01)
        os.kill(actors["generator_0"].pid, signal.SIGSTOP)
        rank.start()
        rank.join(60)
        assert rank.exitcode == EXIT_CODE
        log = (tmp_path / "logs" / "rank_0.log").read_text()
        assert "generator 0 stopped in step 0, in sample" in log and "rank 0 stopped" not in log
        assert "rollouts of generator_0" in log, "what rank 0 waits for"
    finally:
        generator.kill()
        rank.kill()


def test_who_waits_for_one_that_moves_has_not_stopped(tmp_path):
    generators, ranks = {}, {}
    try:
        for how in ("moving", "idle"):
            run = tmp_path / how
            generators[how] = CONTEXT.Process(target=_generate, args=(run, how), daemon=True)
            ranks[how] = CONTEXT.Process(target=_wait_for_rollouts, args=(run, 2 * SECONDS, how), daemon=True)
            generators[how].start()
            while "generator_0" not in read_actors(run):
                time.sleep(0.01)
            ranks[how].start()
        for how, rank in ranks.items():
            rank.join(60)
            assert rank.exitcode == 0, how
    finally:
        for process in [*generators.values(), *ranks.values()]:
            process.kill()


def _stop_itself(run):
    timeline = Timeline()
    with Heartbeat(run, "rank_0", timeline, SECONDS / 10) as heartbeat, Watchdog(heartbeat, 0, 1, SECONDS):
        time.sleep(SECONDS / 4)  # some looks of the watchdog
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(SECONDS / 4)


def test_a_process_is_not_blamed_for_the_time_that_it_was_stopped_itself(tmp_path):
    rank = CONTEXT.Process(target=_stop_itself, args=(tmp_path,), daemon=True)
    rank.start()
    try:
        while not (actors := read_actors(tmp_path)) or actors["rank_0"].process != "stopped":
            time.sleep(0.01)
        time.sleep(SECONDS + 0.5)
        os.kill(rank.pid, signal.SIGCONT)
        rank.join(60)
        assert rank.exitcode == 0
    finally:
        rank.kill()


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
