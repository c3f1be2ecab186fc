"""A rank that stops is named, with its step and phase, and leaves behind what there is to see."""

import json
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

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

    with open_logs(run, rank, 2), Watchdog(timeline, run, rank, 2, SECONDS):
        for step in range(1, 100):
            timeline.begin(step)
            with timeline.span("forward"):
                if rank == 1 and step == 3:
                    if how == "frozen":
                        os.kill(os.getpid(), signal.SIGSTOP)
                    time.sleep(60)
            with timeline.span("backward"):
                dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("how", ["frozen", "asleep"])
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
        if how == "asleep":
            processes[1].join(60)
            assert processes[1].exitcode == EXIT_CODE
            assert "in _train" in (tmp_path / "logs" / "stacks_rank_1.txt").read_text()
    finally:
        for process in processes:
            process.kill()


def test_a_run_that_goes_on_is_left_alone_and_its_files_are_removed(tmp_path):
    timeline = Timeline()
    with Watchdog(timeline, tmp_path, 0, 2, 0.5):
        for step in range(8):
            timeline.begin(step)
            time.sleep(0.1)
    assert not list((tmp_path / "logs").glob("heartbeat*"))
