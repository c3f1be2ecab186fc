"""A reinforcement run in a process of its own, with generators in others, and what a test does to them."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

from lockstep.rl.reinforce import reinforce
from lockstep.workers.processes import descendants
from tests.parallel.launch import CONTEXT
from tests.rl.processes import command_of, is_alive


def _run(config):
    import torch

    # As of a run from a terminal, whose whole group a Ctrl-C reaches.
    os.setpgid(0, 0)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    with open(f"{config.output}.log", "ab") as file:
        os.dup2(file.fileno(), 2)
    hold = Path(f"{config.output}.hold")

    def wait(step, metrics):
        while hold.is_file() and step >= int(hold.read_text() or 0):
            time.sleep(0.005)

    stall = Path(f"{config.output}.stall")
    if stall.is_file():
        _stall_in_rename(*stall.read_text().split(), stall)
    reinforce(config, on_metrics=wait)


def _stall_in_rename(moment, name, mark):
    """Whoever gives a file or folder this name stands still `before` or `after` it has it; `mark` is gone then."""
    exact = Path.rename

    def rename(self, target):
        if Path(target).name != name:
            return exact(self, target)
        if moment == "after":
            exact(self, target)
        mark.unlink()
        time.sleep(3600)

    Path.rename = rename


class Disturbed:
    """The trainer of `config`; `start` starts it again."""

    def __init__(self, config, until=10**6, stall=""):
        """stall: "before NAME" or "after NAME", as for `_stall_in_rename`; of the first start."""
        self.config, self.folder = config, Path(config.output)
        self.stall = Path(f"{config.output}.stall")
        if stall:
            self.stall.write_text(stall)
        self.hold(until)
        self.start()

    def hold(self, step=10**6):
        """The run waits after this step, and goes on if it has waited after an earlier one."""
        new = Path(f"{self.folder}.new")
        new.write_text(str(step))
        new.rename(f"{self.folder}.hold")

    def start(self):
        self.process = CONTEXT.Process(target=_run, args=(self.config,), daemon=True)
        self.process.start()

    @property
    def step(self):
        """The last that it has done; -1: none, nor the validation before them."""
        path = self.folder / "metrics.jsonl"
        return len(path.read_text().splitlines()) - 1 if path.is_file() else -1

    @property
    def said(self):
        """All that the trainer has logged."""
        path = Path(f"{self.folder}.log")
        return path.read_text() if path.is_file() else ""

    def generators(self):
        """The processes of each generator, by its name, that live."""
        found = {}
        for process in descendants(self.process.pid):
            command = command_of(process)
            if "--name" in command:
                found.setdefault(command[command.index("--name") + 1], []).append(process)
        return found

    def wait(self, condition, seconds=90):
        """Returns once `condition()`; the trainer must live until then."""
        until = time.monotonic() + seconds
        while not condition():
            assert self.process.is_alive(), "the trainer has ended"
            assert time.monotonic() < until, "it does not come"
            time.sleep(0.01)

    def wait_for_step(self, step):
        self.wait(lambda: self.step >= step)

    def wait_for_generator(self, name):
        """Returns its process once it has joined, the first one's of several ranks."""
        found = []

        def has_joined():
            found[:] = [p for p in self.generators().get(name, []) if f"{name} joins, process {p} " in self.said]
            return found

        self.wait(has_joined)
        return found[0]

    def end(self, seconds=240):
        """Waits for the trainer's end; returns its exit code."""
        self.process.join(seconds)
        assert not self.process.is_alive()
        return self.process.exitcode

    def kill_all(self):
        """SIGKILL for the trainer, and for whatever it has started."""
        below = [pid for pids in self.generators().values() for pid in pids]
        for pid in [self.process.pid, *below]:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.join()


def unfinished(said):
    """Of each generator that was lost: the samples that others have gone on with, in order."""
    return [int(count) for count in re.findall(r"its (\d+) unfinished samples", said)]
