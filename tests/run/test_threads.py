"""Small work beside other work runs on one thread."""

import os
import subprocess
import sys

import pytest
import torch

from lockstep.model import preset
from lockstep.run import threads as threads_module
from lockstep.run.threads import busy_neighbours, fitting_threads


def test_small_work_with_company_gets_one_thread_and_other_work_all_of_them(monkeypatch):
    monkeypatch.setattr(threads_module, "busy_neighbours", lambda: 1)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with fitting_threads(preset("qwen3:micro"), 1024) as threads:
            assert threads == torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
        for size, tokens in (("micro", 8192), ("tiny", 8192), ("0.6b", 64)):
            with fitting_threads(preset(f"qwen3:{size}"), tokens) as threads:
                assert threads == 3
        monkeypatch.setattr(threads_module, "busy_neighbours", lambda: 0)
        with fitting_threads(preset("qwen3:micro"), 1024) as threads:
            assert threads == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts what runs")
def test_a_busy_process_is_seen():
    neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        assert busy_neighbours() >= 1
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp is Linux's")
def test_waiting_threads_do_not_spin_for_long():
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    shown = subprocess.run(
        [sys.executable, "-c", "import lockstep.train"],
        env=environment | {"OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "GOMP_SPINCOUNT = '1000'" in shown.stderr, "set before torch loads the library that reads it"
