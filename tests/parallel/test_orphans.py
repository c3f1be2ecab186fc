"""Ranks do not outlive the torchrun that started them."""

import os
import signal
import subprocess
import sys
import time

import pytest

WORKER = """
import os, time
from lockstep.config import ParallelConfig
from lockstep.parallel import open_world

world = open_world(ParallelConfig(), "cpu")
open(f"rank{world.rank}", "w").write(str(os.getpid()))
if world.rank == 0:
    time.sleep(300)
world.barrier()
"""


def _runs(process):
    try:
        # A zombie is one that has ended.
        return open(f"/proc/{process}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_ranks_whose_torchrun_was_killed_end_within_10_seconds(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "worker.py"]
    torchrun = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    ranks = []
    try:
        end = time.monotonic() + 90
        while len(ranks) < 2:
            assert time.monotonic() < end and torchrun.poll() is None
            ranks = [int(text) for p in tmp_path.glob("rank*") if (text := p.read_text())]
            time.sleep(0.05)
        torchrun.send_signal(signal.SIGKILL)
        torchrun.wait()
        end = time.monotonic() + 10
        while any(map(_runs, ranks)):
            assert time.monotonic() < end, "a rank that computes, or one that waits for it, is still there"
            time.sleep(0.05)
    finally:
        torchrun.kill()
        for rank in filter(_runs, ranks):
            os.kill(rank, signal.SIGKILL)
