"""What torchrun's ranks print alike is printed once, and nothing is lost."""

import os
import signal
import subprocess
import sys
import time
from itertools import chain

import pytest

# A command that does what its argument says, as COMMANDS[name](arguments) would.
PROGRAM = """
import logging, os, subprocess, sys, time, warnings
from lockstep import cli
from lockstep.errors import UserError

rank = os.environ.get("RANK", "0")

def refuse(text):
    raise UserError(text)

def command(arguments):
    exec(arguments[0])
    return 0

cli.COMMANDS["test"] = command
sys.exit(cli.main(["test", sys.argv[1]]))
"""


@pytest.fixture
def ranks(tmp_path):
    """Starts ranks with the environment that torchrun gives them; returns their processes."""
    started = []

    def start(code, count=2, attempt=0):
        for rank in range(count):
            own = tmp_path / f"attempt_{attempt}" / str(rank)
            own.mkdir(parents=True, exist_ok=True)
            environment = os.environ | {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count),
                "TORCHELASTIC_ERROR_FILE": str(own / "error.json"),
            }  # fmt: skip
            program = [sys.executable, "-c", PROGRAM, code]
            started.append(subprocess.Popen(program, env=environment, stderr=subprocess.PIPE, text=True))
        return started[-count:]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def _lines(processes):
    return [process.communicate(timeout=60)[1].splitlines() for process in processes]


def test_an_error_of_all_ranks_is_printed_once(ranks):
    processes = ranks("refuse('bad input')")
    assert list(chain(*_lines(processes))) == ["lockstep: bad input"]
    assert [process.returncode for process in processes] == [2] * 2
    # And again by a restarted attempt.
    assert list(chain(*_lines(ranks("refuse('bad input')", attempt=1)))) == ["lockstep: bad input"]


def test_an_error_of_one_rank_is_printed_with_its_number(ranks):
    assert _lines(ranks("rank == '1' and refuse('no such file')")) == [[], ["lockstep: rank 1: no such file"]]


def test_a_rank_that_is_ended_while_it_waits_prints_its_error_first(ranks):
    code = "print('ready', file=sys.stderr, flush=True); rank == '1' and refuse('the cause'); time.sleep(60)"
    first, second = ranks(code)
    assert second.stderr.readline() == "ready\n"
    time.sleep(0.5)
    second.send_signal(signal.SIGTERM)
    assert second.communicate(timeout=60)[1] == "lockstep: rank 1: the cause\n"
    assert second.returncode == -signal.SIGTERM and first.poll() is None


def test_commands_that_a_rank_starts_are_no_ranks(ranks):
    code = "rank == '0' and [subprocess.run([sys.executable, '-m', 'lockstep', 'trian']) for _ in range(2)]"
    (first, _) = _lines(ranks(code))
    assert len(first) == 2 and all('unknown command "trian"' in line for line in first)


@pytest.mark.slow
def test_torchruns_ranks_print_a_refusal_once(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "lockstep", "pretrain"]
    options = ["--recipe", "tiny", "--sequence-length", "99999", "--device", "cpu", "--output", str(tmp_path / "run")]
    result = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120)
    assert result.returncode != 0 and result.stderr.count("does not divide into rows") == 1, result.stderr
