"""A signal within a step that takes longer than the run has to end: nothing learned is lost, nor any bit."""

import os
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.config import ActorsConfig, CheckpointConfig, FaultConfig, RewardConfig, to_toml
from lockstep.observe.metrics import read_metrics
from lockstep.rl.rollouts.sampling import POLLING_STEPS
from tests.parallel.launch import CONTEXT, free_port, launch, ranks_environment
from tests.rl.generators.test_colocated import LAYOUTS, ONE, config_of, outcome, run

TASK = """
import os, time
from pathlib import Path
import numpy as np
import lockstep.rl as rl

FOLDER = Path(__file__).parent

def holds(where, rank=""):
    # Once the steps that the mark names are done, and on the rank that it names.
    mark, metrics = FOLDER / where, FOLDER / "run" / "metrics.jsonl"
    try:
        steps, own = mark.read_text().split(",")
    except FileNotFoundError:  # or removed just now
        return False
    held = rank in ("", own) and (len(metrics.read_text().splitlines()) - 1 if metrics.exists() else -1) == int(steps)
    if held:
        (FOLDER / "reached").touch()
    return held

def stall(where, rank=""):
    while holds(where, rank):
        time.sleep(0.01)

class Vowels(rl.Environment):
    noise = 0
    def examples(self, split):
        words = "stone", "river", "cloud", "apple", "winter", "summer", "leaves in autumn"
        return [rl.Example(prompt=word) for word in (words if split == "train" else ("tree", "moon"))]
    def reward(self, example, completion):
        noise = self.noise and float(np.random.random())
        stall("judge" if example.prompt in ("tree", "moon") else "grade")
        return {"vowels": sum(c in "aeiou" for c in completion) / (1 + len(completion)) + noise}

class Drawing(Vowels):
    # What the interrupted step has drawn is drawn again.
    noise = 1

class Awaiting(Vowels):
    async def reward(self, example, completion):
        import asyncio
        while holds("grade"):
            await asyncio.sleep(0.01)
        return super().reward(example, completion)

class Talk(rl.ConversationEnvironment):
    def examples(self, split):
        for word in ("stone", "river", "cloud", "apple", "winter"):
            yield rl.Example(prompt=word)
    async def converse(self, example, chat):
        chat.add(example.prompt)
        text = (await chat.reply()).text
        stall("grade")
        return {"e": float(text.count("e"))}
"""


SLOW = 0.4
"""Seconds that a micro-batch takes."""


def _end(config, folder, environment, resume):
    """The command, as a process; its sampling stalls, and training is slow, where `folder` has a mark."""
    from lockstep.cli import main
    from lockstep.generate import Engine
    from lockstep.rl.scoring.forward import ForwardPasses
    from lockstep.rl.scoring.policy_loss import PolicyLoss

    os.environ |= environment
    with open(folder / "said", "ab") as file:
        os.dup2(file.fileno(), 2)
    sys.path.insert(0, str(folder))
    from task import holds, stall

    exact = Engine._step

    def step(engine):
        exact(engine)
        with open(folder / "steps", "ab") as file:
            file.write(b".")
        stall("sample", os.environ.get("RANK", "0"))

    Engine._step = step
    loss = PolicyLoss.__call__

    def slow_loss(*arguments):
        if holds("train"):
            time.sleep(SLOW)
        return loss(*arguments)

    PolicyLoss.__call__ = slow_loss
    per_token = ForwardPasses.per_token

    def stalled_scores(*arguments):
        scores = per_token(*arguments)
        stall("score")
        return scores

    ForwardPasses.per_token = stalled_scores
    sys.exit(main(["rl", "--config", str(config), *(["--resume"] if resume else [])]))


class Ended:
    """A run in `folder` that a signal ends while it stands still in a step."""

    def __init__(self, folder, config, mark, steps, ranks=1, own="0"):
        """mark: "sample" (after a step of the engine), "grade", "score" (by the reference), "train" (in a loss) or
        "judge" (a validation). steps: those done before. own: the rank whose sampling stands still."""
        self.folder = folder
        (folder / "said").unlink(missing_ok=True)
        (folder / mark).write_text(f"{steps},{own}")
        (folder / "run.toml").write_text(to_toml(config))
        port = free_port()
        environments = [{}] if ranks == 1 else [ranks_environment(rank, ranks, port) for rank in range(ranks)]
        self.processes = [
            CONTEXT.Process(target=_end, args=(folder / "run.toml", folder, environment, config.resume), daemon=True)
            for environment in environments
        ]
        for process in self.processes:
            process.start()
        until = time.monotonic() + 120
        while not (folder / "reached").exists():
            assert time.monotonic() < until and all(p.is_alive() for p in self.processes), self.said
            time.sleep(0.01)

    @property
    def said(self):
        return (self.folder / "said").read_text()

    def end(self, number, *ranks):
        """Sends the signal to these ranks; returns all ranks' exit codes."""
        for rank in ranks or range(len(self.processes)):
            os.kill(self.processes[rank].pid, number)
        return self.wait()

    def check(self, number, saved, *ranks):
        """Ends it and sees that it has saved step `saved`, which its last message names."""
        assert self.end(number, *ranks) == [128 + number] * len(self.processes), self.said
        self.check_saved(number, saved)

    def check_saved(self, number, saved):
        assert f"{signal.Signals(number).name} ended the run after step {saved}, which is saved" in self.said
        assert "Traceback" not in self.said and "finished" not in self.said
        assert checkpoints(self.folder / "run")[-1] == f"step_{saved:08}"
        assert (self.folder / "run" / "report.html").is_file()

    def wait(self):
        for process in self.processes:
            process.join(120)
        for mark in ("sample", "grade", "score", "train", "judge", "reached"):
            (self.folder / mark).unlink(missing_ok=True)
        return [process.exitcode for process in self.processes]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    return tmp_path


def settings(folder, model, environment, parallel=ONE, **changes):
    # Longer than any step takes that nothing holds, shorter than one that stands still.
    changes = {"steps": 3, "updates_per_batch": 1, **changes}
    config = config_of(folder / "task.py", model, folder / "run", parallel, **changes)
    return replace(config, environment=f"{folder / 'task.py'}:{environment}", faults=FaultConfig(stop_seconds=30))


def checkpoints(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def learned(folder):
    """The last weights and moments."""
    last = folder / "checkpoints" / "step_00000003"
    return [(last / name).read_bytes() for name in ("model.safetensors", "trainer/optimizer.safetensors")]


def check_it_continues(config, ranks=1):
    """A resumed run is the one that was never ended, whose folder is returned."""
    launch(ranks, run, replace(config, resume=True))
    resumed = Path(config.output)
    whole = resumed.with_name("whole")
    launch(1, run, replace(config, output=str(whole), parallel=ONE))
    assert outcome(resumed) == outcome(whole)
    assert learned(resumed) == learned(whole)
    return whole


def test_a_run_interrupted_in_each_part_of_a_step_continues_with_the_same_bits(folder, model_folder):
    config = settings(
        folder, model_folder, "Drawing", rewards=RewardConfig(isolate="never"), kl_coefficient=0.1, updates_per_batch=2
    )
    Ended(folder, config, "score", steps=1).check(signal.SIGINT, saved=1)  # after all that the step draws
    config = replace(config, resume=True)
    for mark in ("grade", "sample"):
        Ended(folder, config, mark, steps=1).check(signal.SIGTERM, saved=1)
    # Updates, once begun, complete with their step.
    Ended(folder, config, "train", steps=1).check(signal.SIGTERM, saved=2)
    check_it_continues(config)


@pytest.mark.parametrize(
    ("environment", "isolate"),
    [
        ("Talk", "auto"),
        pytest.param("Vowels", "auto", marks=pytest.mark.slow),
        pytest.param("Awaiting", "never", marks=pytest.mark.slow),
    ],
)
def test_workers_coroutines_and_conversations_are_interrupted_too(folder, model_folder, environment, isolate):
    rewards = RewardConfig(isolate=isolate, workers=1, seconds=600)
    config = settings(folder, model_folder, environment, rewards=rewards)
    Ended(folder, config, "grade", steps=1).check(signal.SIGINT, saved=1)


@pytest.mark.slow
def test_conversations_of_later_steps_delay_nothing(folder, model_folder):
    actors = ActorsConfig(generators=1, max_staleness=1, on_update="continue")
    config = settings(folder, model_folder, "Talk", actors=actors, rewards=RewardConfig(workers=1, seconds=600))
    ended = Ended(folder, config, "grade", steps=1)
    assert ended.end(signal.SIGTERM) == [143], ended.said
    # Those that stand still are of step 2 or already of step 3.
    assert re.search("SIGTERM ended the run after step [12], which is saved", ended.said), ended.said
    assert "Traceback" not in ended.said


@pytest.mark.slow
def test_conversations_that_ranks_sample_together_are_interrupted_where_one_drives(folder, model_folder):
    rewards = RewardConfig(workers=1, seconds=600)
    config = settings(folder, model_folder, "Talk", LAYOUTS["TP 2"][1], rewards=rewards)
    Ended(folder, config, "grade", steps=1, ranks=2).check(signal.SIGTERM, 1)
    check_it_continues(config, ranks=2)


@pytest.mark.parametrize("steps", [pytest.param(-1, marks=pytest.mark.slow), 0])
def test_in_the_first_step_and_in_the_validation_before_it_there_is_nothing_to_save(folder, model_folder, steps):
    ended = Ended(folder, settings(folder, model_folder, "Vowels"), "sample", steps)
    assert ended.end(signal.SIGINT) == [130]
    assert "SIGINT ended the run in its first step, before there was anything to save" in ended.said
    assert not (folder / "run").exists() if steps < 0 else checkpoints(folder / "run") == []


@pytest.mark.parametrize(
    ("step", "every", "layout", "environment"),
    [
        (2, 2, "one process", "Drawing"),
        pytest.param(2, 2, "FSDP 2", "Vowels", marks=pytest.mark.slow),
        pytest.param(2, 2, "TP 2", "Vowels", marks=pytest.mark.slow),
        pytest.param(3, 0, "one process", "Drawing", marks=pytest.mark.slow),  # the last
        pytest.param(2, 2, "a generator", "Vowels", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_validation_leaves_no_trace_and_a_resumed_run_begins_with_it(
    folder, model_folder, step, every, layout, environment
):
    ranks, parallel = LAYOUTS.get(layout, (1, ONE))
    changes = {"actors": ActorsConfig(generators=1)} if layout == "a generator" else {}
    config = settings(folder, model_folder, environment, parallel, validation_every=every, **changes)
    Ended(folder, config, "judge", steps=step - 1, ranks=ranks).check(signal.SIGINT, step)
    last = read_metrics(folder / "run" / "metrics.jsonl")[-1]
    assert last["step"] == step and "loss" in last and not [name for name in last if name.startswith("validation/")]
    # Again, before it has begun another step.
    Ended(folder, replace(config, resume=True), "judge", steps=step, ranks=ranks).check(signal.SIGTERM, step)
    whole = check_it_continues(config, ranks)
    if step == 2 and layout == "one process":  # what validations draw leaves training as it is
        run(replace(config, output=str(folder / "not"), validation_every=0, validation_examples=0))
        lines = [read_metrics(each / "metrics.jsonl") for each in (whole, folder / "not")]
        validated, alone = ([(m["loss"], m["reward/mean"]) for m in each if "loss" in m] for each in lines)
        assert validated == alone and len(alone) == 3 and len(lines[0]) == 4


@pytest.mark.slow
def test_what_is_saved_already_is_not_saved_again(folder, model_folder):
    config = settings(folder, model_folder, "Vowels", checkpoint=CheckpointConfig(every=1, asynchronous=False))
    ended = Ended(folder, config, "sample", steps=1)
    (saved,) = (folder / "run" / "checkpoints").iterdir()
    before = saved.stat()
    ended.check(signal.SIGINT, 1)
    assert saved.stat().st_ino == before.st_ino
    # And as it is resumed from.
    Ended(folder, replace(config, resume=True), "sample", steps=1).check(signal.SIGINT, 1)
    assert saved.stat().st_ino == before.st_ino


@pytest.mark.slow
@pytest.mark.parametrize(("mark", "steps"), [("sample", 2), ("train", 1)])
def test_a_rank_that_is_interrupted_interrupts_the_others_and_updates_once_begun_complete(
    folder, model_folder, mark, steps
):
    config = settings(folder, model_folder, "Vowels", LAYOUTS["FSDP 2"][1], updates_per_batch=2)
    Ended(folder, config, mark, steps, ranks=2, own="1").check(signal.SIGTERM, 2, 1)
    check_it_continues(config, ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize("signalled", [0, 1])
def test_ranks_that_share_matrices_stop_sampling_together_where_one_has_a_signal(folder, model_folder, signalled):
    config = settings(folder, model_folder, "Vowels", LAYOUTS["TP 2"][1])
    ended = Ended(folder, config, "sample", steps=2, ranks=2, own="0")
    os.kill(ended.processes[signalled].pid, signal.SIGTERM)
    until = time.monotonic() + 60
    said = folder / ("run/logs/rank_1.log" if signalled else "said")
    while "SIGTERM: the run saves and ends" not in said.read_text():
        assert time.monotonic() < until
        time.sleep(0.01)
    steps = (folder / "steps").stat().st_size
    (folder / "sample").unlink()  # rank 0 continues, and hears of it
    assert ended.wait() == [143, 143]
    ended.check_saved(signal.SIGTERM, 2)
    # Of both ranks, and of ten tokens a sample.
    assert (folder / "steps").stat().st_size - steps <= 2 * POLLING_STEPS
    check_it_continues(config, ranks=2)
