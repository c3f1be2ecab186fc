"""A run that is killed at any moment, saving included, and resumed is the run that was never killed, bit for bit."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from lockstep.config import CheckpointConfig, TrainConfig
from lockstep.train.pretrain import pretrain
from tests.parallel.launch import launch, start
from tests.train.runs import text_run


def _config(tmp_path, name, dtype, steps):
    return text_run(
        tmp_path, name, repeats=300, tokens_per_step=128, sequence_length=32, steps=steps, dtype=dtype, resume=True,
        train=TrainConfig(tokens_per_microbatch=64), checkpoint=CheckpointConfig(every=1),
    )  # fmt: skip


def _lines(folder):
    path = folder / "metrics.jsonl"
    return path.read_text().splitlines() if path.is_file() else []


def _history(folder):
    lines = [json.loads(line) for line in _lines(folder)]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


def _wait(processes, folder, steps, saving, seconds=60):
    end = time.monotonic() + seconds
    while len(_lines(folder)) < steps or (saving and not list((folder / "checkpoints").glob("*.partial"))):
        assert time.monotonic() < end and all(p.is_alive() for p in processes)
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("dtype", "ranks", "steps", "kills"),
    [
        ("bfloat16", 1, 5, 1),
        pytest.param("float32", 1, 24, 4, marks=pytest.mark.slow),
        pytest.param("bfloat16", 2, 24, 4, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_killed_again_and_again_is_the_run_that_never_was(tmp_path, dtype, ranks, steps, kills):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    launch(ranks, pretrain, _config(tmp_path, "whole", dtype, steps))
    draw = random.Random(f"{dtype} {ranks}")
    config = _config(tmp_path, "killed", dtype, steps)
    for kill in range(kills):
        written = len(_lines(killed))
        processes = start(ranks, pretrain, config)
        # New steps are written, and a moment of one is met: every other time, one within a save.
        _wait(processes, killed, steps=written + draw.randint(1, 2), saving=kill % 2 == 0)
        time.sleep(draw.random() * 0.03)
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
        for process in processes:
            process.join()
    launch(ranks, pretrain, config)
    assert _history(killed) == _history(whole) and len(_history(whole)) == steps


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2"]
TORCHRUN += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
WORKER = """
import os, pathlib, signal, sys, threading, time
run, once = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])

def kill_at_step_5():
    metrics = run / "metrics.jsonl"
    while not (metrics.is_file() and len(metrics.read_text().splitlines()) >= 5):
        time.sleep(0.005)
    once.touch()
    os.kill(os.getpid(), signal.SIGKILL)

if os.environ["RANK"] == "1" and not once.exists():
    threading.Thread(target=kill_at_step_5, daemon=True).start()
from lockstep.cli import main
sys.exit(main(["pretrain", "--output", str(run), "--resume", *sys.argv[3:]]))
"""


@pytest.mark.slow
def test_torchrun_restarts_a_run_whose_worker_died_and_nothing_is_lost(tmp_path):
    config = _config(tmp_path, "whole", "float32", 12)
    launch(2, pretrain, config)
    (tmp_path / "worker.py").write_text(WORKER)
    options = ["--model", "qwen3:micro", "--data", config.data, "--tokens-per-step", "128", "--sequence-length", "32"]
    options += ["--steps", "12", "--train.tokens-per-microbatch", "64", "--dtype", "float32", "--device", "cpu"]
    options += ["--checkpoint.every", "2"]
    result = subprocess.run(
        [*TORCHRUN, str(tmp_path / "worker.py"), str(tmp_path / "run"), str(tmp_path / "once"), *options],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert (tmp_path / "once").exists() and _history(tmp_path / "run") == _history(tmp_path / "whole")
