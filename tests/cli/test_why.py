"""`lockstep why` and the watchdog name the actor that holds everybody up, whatever became of its process."""

import json
import os
import signal
import socket
import time

import pytest

from lockstep.cli import main
from lockstep.commands.why import frames_of, why
from lockstep.config import (
    CheckpointConfig,
    EngineConfig,
    FaultConfig,
    RewardConfig,
    RLConfig,
    TrainConfig,
)
from lockstep.errors import UserError
from lockstep.observe.actors import read_actors
from lockstep.observe.watchdog import EXIT_CODE
from tests.parallel.launch import CONTEXT, free_port, ranks_environment

TASK = """
import time
from pathlib import Path
import lockstep.rl as rl

class Vowels(rl.Environment):
    def examples(self, split):
        for word in ("stone", "river", "cloud", "apple", "winter", "summer", "leaves in autumn", "x"):
            yield rl.Example(prompt=f"{split} {word}", answer="")
    def reward(self, example, completion):
        return {"vowels": sum(c in "aeiou" for c in completion) / (1 + len(completion))}

class Gate(Vowels):
    def reward(self, example, completion):
        while example.prompt.startswith("train") and not Path(__file__).with_name("go").exists():
            time.sleep(0.01)
        return super().reward(example, completion)

"""
PATIENCE = 60.0
"""Seconds that a test waits for what must come."""


def config_of(folder, model, environment, **changes):
    (folder / "task.py").write_text(TASK)
    settings = dict(
        output=str(folder / "run"), model=str(model), environment=f"{folder / 'task.py'}:{environment}", steps=10_000,
        prompts_per_step=4, samples_per_prompt=3, max_new_tokens=10, validation_examples=3,
        rewards=RewardConfig(isolate="never", seconds=0.01),
        engine=EngineConfig(max_tokens_per_step=256, max_sequences=8, cache_tokens=2048),
        train=TrainConfig(learning_rate=1e-3, warmup_steps=0, schedule="constant", tokens_per_microbatch=64),
        checkpoint=CheckpointConfig(every=0), faults=FaultConfig(watchdog_seconds=5.0),
    )  # fmt: skip
    return RLConfig(**(settings | changes))


def _reinforce(environment, config):
    import torch

    torch.set_num_threads(1)
    os.environ |= environment
    os.environ.pop("WORLD_SIZE") if environment["WORLD_SIZE"] == "1" else None
    from lockstep.rl.reinforce import reinforce

    reinforce(config)


@pytest.fixture
def start():
    """Starts a run on so many ranks; all of them are killed in the end."""
    started = []

    def begin(ranks, config):
        port = free_port()
        own = [
            CONTEXT.Process(target=_reinforce, args=(ranks_environment(rank, ranks, port), config), daemon=True)
            for rank in range(ranks)
        ]
        started.extend(own)
        for process in own:
            process.start()
        return own

    yield begin
    for process in started:
        process.kill()


def wait_for(condition, processes):
    until = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < until and all(process.is_alive() for process in processes)
        time.sleep(0.005)
    return found


def stop_in(run, name, phases, processes):
    """SIGSTOP for the actor, at a moment when it is in one of `phases`."""
    while True:
        actor = wait_for(lambda: read_actors(run).get(name), processes)
        if actor.phase in phases and actor.step:
            os.kill(actor.pid, signal.SIGSTOP)
            stopped = wait_for(lambda: (a := read_actors(run)[name]).process == "stopped" and a, processes)
            if stopped.phase in phases:
                return stopped
            os.kill(actor.pid, signal.SIGCONT)


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named_while_it_samples_and_while_it_trains(tmp_path, model_folder, start):
    config = config_of(tmp_path, model_folder, "Vowels")
    run, ranks = tmp_path / "run", start(2, config)
    for phases in (("generate",), ("forward", "backward", "optimizer")):
        stopped = stop_in(run, "rank_1", phases, ranks)
        found = wait_for(lambda: (e := why(run)).stacks["rank_0"].frames and e, ranks)
        assert [actor.name for actor in found.held_up_by] == ["rank_1"] and not found.moves
        place = f"rank 1 stopped in step {stopped.step}, in {stopped.phase}: no progress for "
        assert found.summary.startswith(place), found.summary
        assert f"kill -CONT {stopped.pid} lets it continue" in found.summary
        assert "cannot answer" in found.stacks["rank_1"].note
        assert any(" in _reinforce" in frame for frame in found.stacks["rank_0"].frames)
        if phases == ("generate",):
            os.kill(stopped.pid, signal.SIGCONT)
    ranks[0].join(PATIENCE)
    assert ranks[0].exitcode == EXIT_CODE
    log = (run / "logs" / "rank_0.log").read_text()
    assert place in log and "rank 0 stopped" not in log
    assert "rank 0  " in log.split("who waits for whom")[1]


def test_a_rank_that_was_killed_is_the_cause_and_not_the_one_that_lost_it(tmp_path, model_folder, start, capsys):
    config = config_of(tmp_path, model_folder, "Vowels")
    run, ranks = tmp_path / "run", start(2, config)
    killed = wait_for(lambda: (a := read_actors(run).get("rank_1")) and a.step and a, ranks)
    os.kill(killed.pid, signal.SIGKILL)
    for process in ranks:
        process.join(PATIENCE)
    assert main(["why", str(run)]) == 1
    said = capsys.readouterr().out
    assert said.startswith("the run has ended: rank 1 stopped in step ") and "is gone: it was killed" in said
    assert main(["why", str(run), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["held_up_by"] == ["rank_1"]
    assert [actor["state"] for actor in found["actors"]] == ["ended", "gone"]


def test_one_process_alone_is_named_where_it_stands_until_it_has_ended(tmp_path, model_folder, start, capsys):
    config = config_of(tmp_path, model_folder, "Gate", steps=1, faults=FaultConfig(watchdog_seconds=0.0))
    run, (process,) = tmp_path / "run", start(1, config)
    (actor,) = [stop_in(run, "rank_0", ("reward",), [process])]
    assert why(run).held_up_by[0].process == "stopped"
    os.kill(actor.pid, signal.SIGCONT)
    # It was stopped somewhere in grading, perhaps before the reward was called.
    wait_for(lambda: any(" in reward" in frame for frame in why(run).stacks["rank_0"].frames), [process])
    work = read_actors(run)["rank_0"].work
    (tmp_path / "go").touch()
    process.join(PATIENCE)
    assert process.exitcode == 0
    # Grading and sampling are progress: of each sampled token at least one engine step.
    assert work >= 2 * config.max_new_tokens + config.validation_examples
    assert main(["why", str(run)]) == 0
    assert capsys.readouterr().out.startswith("the run has finished all its steps")
    assert not (run / "logs").exists()


def test_what_is_no_run_or_says_nothing_is_refused(tmp_path, capsys):
    with pytest.raises(UserError, match="is not a run's folder; give"):
        why(tmp_path)
    (tmp_path / "config.toml").write_text('output = "x"\n')
    assert main(["why", str(tmp_path)]) == 2
    assert "nothing is known about its processes" in capsys.readouterr().err
    (tmp_path / ".lock").write_text(f"process {os.getpid()} on {socket.gethostname()}")
    assert why(tmp_path).summary.startswith(f"the run is starting, without a heartbeat yet: process {os.getpid()}")


def test_frames_are_those_of_the_thread_that_is_asked_for():
    stacks = 'Thread 0x0000000000000abc (most recent call first):\n  File "a.py", line 1 in one\n\n'
    stacks += 'Current thread 0x0000000000000def (most recent call first):\n  File "b.py", line 2 in two\n'
    assert frames_of(stacks, 0xABC) == ['File "a.py", line 1 in one']
    assert frames_of(stacks + stacks, 0xDEF) == ['File "b.py", line 2 in two']
