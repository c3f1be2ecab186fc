"""What a run is given wrongly, or loses on its way: an end with the cause, or a warning and a run that goes on."""

import inspect
import itertools
import json
import os
import resource
import signal
import threading
from typing import ClassVar

import pytest

import lockstep.rl as rl
from lockstep.config import ActorsConfig, EngineConfig, ObserveConfig
from lockstep.errors import RunStopped, UserError
from lockstep.observe import MetricsWriter, open_run, read_metrics, sinks
from lockstep.observe.sinks import PATIENCE, BackgroundSink
from lockstep.rl.reinforce import reinforce
from lockstep.rl.rollouts import prompts
from lockstep.rl.rollouts.prompts import examples_of
from tests.rl.test_algorithm_runs import EvenBytes, _config, folders  # noqa: F401


class Task(rl.Environment):
    given: ClassVar = []

    def examples(self, split):
        yield from (rl.Example(*one) for one in self.given)


def _task(*given):
    task = Task()
    task.given = given
    return task


def test_examples_without_end_are_refused_and_as_many_as_the_bound_are_not(monkeypatch):
    monkeypatch.setattr(prompts, "MOST_EXAMPLES", 1000)
    assert len(examples_of(_task(*((str(n),) for n in range(1000))), "train")) == 1000
    endless = Task()
    endless.given = ((str(n),) for n in itertools.count())
    with pytest.raises(
        UserError, match=r'Task.examples\("train"\) yields more than 1,000 examples, or never ends; yield'
    ):
        examples_of(endless, "train")
    with pytest.raises(UserError, match=r'Task.examples\("train"\) yields nothing; it must yield rl.Example'):
        examples_of(_task(), "train")


def test_examples_that_are_there_twice_are_counted_and_an_id_that_is_names_them(caplog):
    assert len(examples_of(_task(("a", "1"), ("a", "2"), ("b", "1")), "train")) == 3
    assert not caplog.messages, "another answer makes another example"
    assert len(examples_of(_task(("a", "1"), ("b", "1"), ("a", "1"), ("a", "1")), "train")) == 4
    assert caplog.messages == ["Task.examples(\"train\") yields 2 of 4 examples again, such as 'a'"]
    caplog.clear()
    examples_of(_task(("a", "", "x"), ("b", "", "y"), ("c", "", "x")), "validation")
    assert caplog.messages == ["Task.examples(\"validation\") yields the same id for several examples: 'x'"]


def test_a_disk_that_is_full_while_rollouts_are_written_ends_the_run_with_the_file_and_whole_metrics(
    tmp_path,
    folders,  # noqa: F811
):
    """Files may not grow beyond a size, from step 2 on: the system refuses to write as a full disk does."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(step, metrics):
        if step == 2:
            # A little more than the metrics: the rollouts, and the timeline at the end, do not fit.
            size = os.stat(tmp_path / "run/metrics.jsonl").st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, unlimited[1]))

    config = _config(tmp_path / "run", folders[0], samples_per_prompt=32, max_new_tokens=16, steps=3)
    try:
        with pytest.raises(
            RunStopped, match=r"step_00000002.jsonl: the rollouts cannot be written \(File too"
        ) as ended:
            reinforce(config, EvenBytes(), on_metrics=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert ended.value.exit_code == 1
    assert [m["step"] for m in read_metrics(tmp_path / "run/metrics.jsonl")] == [0, 1, 2]
    names = sorted(path.name for path in (tmp_path / "run/rollouts").iterdir())
    assert names == ["step_00000001.jsonl", "validation_00000000.jsonl"], "nothing half-written is left"
    assert not (tmp_path / "run/timeline.json").exists()


def test_a_line_of_metrics_that_the_disk_does_not_take_leaves_the_others_whole(tmp_path):
    run = open_run(str(tmp_path / "run"), "")
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with MetricsWriter(run.path) as writer, pytest.raises(RunStopped, match="metrics of step 2 cannot be written"):
            writer.write(1, {"loss": 1.0})
            before = run.metrics.read_bytes()
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, unlimited[1]))
            writer.write(2, {"loss": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert run.metrics.read_bytes() == before


def test_a_tracker_that_cannot_be_opened_is_named_and_the_run_goes_on(tmp_path, folders, caplog):  # noqa: F811
    """Where TensorBoard wants a folder of its own there is a file."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.toml").write_text("environment = 'digit_sum'\n")
    (tmp_path / "run" / "tensorboard").write_text("a file, no folder")
    config = _config(tmp_path / "run", folders[0], resume=True, steps=1, observe=ObserveConfig(tensorboard=True))
    reinforce(config, EvenBytes())
    said = [message for message in caplog.messages if "observe.tensorboard could not be opened" in message]
    assert len(said) == 1 and "the run continues without it; metrics.jsonl" in said[0]
    assert [m["step"] for m in read_metrics(tmp_path / "run/metrics.jsonl")] == [0, 1]


def test_a_tracker_that_fails_on_its_way_is_left_alone_after_a_few_times(tmp_path, caplog):
    class Unreachable:
        """As a client without a network: every request fails but some."""

        def __init__(self):
            self.tried = []

        def write(self, step, metrics):
            self.tried.append(step)
            if step not in (2, 3):
                raise ConnectionError("no route to host")

        def close(self):
            raise TimeoutError("nobody answers")

    tracker = Unreachable()
    run = open_run(str(tmp_path / "run"), "")
    with MetricsWriter(run.path) as writer:
        writer._sinks = [BackgroundSink("wandb", lambda: tracker, run.path)]
        for step in range(1, 12):
            writer.write(step, {"loss": 1.0})
    assert tracker.tried == [*range(1, 4 + PATIENCE)], "steps 1, 2 and 3, and then three in a row"
    first, second = caplog.messages
    assert "observe.wandb could not be written to at step 6 (no route to host), and the run continues" in first
    assert "observe.wandb could not be closed (nobody answers)" in second
    assert [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()] == list(range(1, 12))


def test_a_tracker_that_ends_its_thread_as_it_is_opened_is_named(tmp_path, caplog):
    run = open_run(str(tmp_path / "run"), "")

    def opened():
        raise SystemExit("log in first")

    with MetricsWriter(run.path) as writer:
        writer._sinks = [BackgroundSink("wandb", opened, run.path)]
        writer.write(1, {"loss": 1.0})
    (said,) = caplog.messages
    assert "observe.wandb could not be opened (log in first), and the run continues without it" in said


@pytest.mark.parametrize("stuck_in", ["open", "write", "close"])
def test_a_tracker_that_never_returns_holds_nothing_up(tmp_path, caplog, monkeypatch, stuck_in):
    stuck, never = threading.Event(), threading.Event()

    class Tracker:
        def __init__(self):
            self.stand("open")

        def write(self, step, metrics):
            self.stand("write")

        def close(self):
            self.stand("close")

        def stand(self, where):
            if where == stuck_in:
                stuck.set()
                never.wait(30)

    monkeypatch.setattr(sinks, "MAX_QUEUED", 5)
    monkeypatch.setattr(sinks, "CLOSE_SECONDS", 0.1)
    run = open_run(str(tmp_path / "run"), "")
    with MetricsWriter(run.path) as writer:
        writer._sinks = [BackgroundSink("wandb", Tracker, run.path)]
        writer.write(1, {"loss": 1.0})
        assert stuck_in == "close" or stuck.wait(60)
        for step in range(2, 10) if stuck_in != "close" else ():
            writer.write(step, {"loss": 1.0})
    never.set()
    said = ["observe.wandb did not finish within 0.1 s and is abandoned"]
    if stuck_in != "close":
        step, slow = (7, 3) if stuck_in == "write" else (6, 4)  # one has been taken to be written
        said.insert(0, f"observe.wandb is 5 steps behind at step {step}, and drops steps until it catches up")
        said.append(f"observe.wandb was too slow: {slow} steps are missing in it")
    assert len(caplog.messages) == len(said)
    assert all(message.startswith(start) for message, start in zip(caplog.messages, said))
    assert [m["step"] for m in read_metrics(run.metrics)] == list(range(1, 10 if stuck_in != "close" else 2))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_with_its_report(tmp_path, folders, number):  # noqa: F811
    def on_metrics(step, metrics):
        if step == 1:
            os.kill(os.getpid(), number)

    with pytest.raises(RunStopped, match=f"{number.name} ended the run after step .*, which is saved"):
        reinforce(_config(tmp_path / "run", folders[0], steps=100), EvenBytes(), on_metrics=on_metrics)
    report = (tmp_path / "run/report.html").read_text()
    assert "grpo on tests.rl.test_algorithm_runs.EvenBytes" in report
    assert 1 <= read_metrics(tmp_path / "run/metrics.jsonl")[-1]["step"] < 100


def test_a_prompt_that_does_not_fit_in_the_cache_names_its_example(tmp_path, folders):  # noqa: F811
    config = _config(tmp_path / "run", folders[0], engine=EngineConfig(max_sequences=2, cache_tokens=16))
    said = r"example 'a+': its prompt of 20 tokens and max_new_tokens 5 do not fit in the cache of 16 tokens; raise"
    with pytest.raises(UserError, match=said + " engine.cache_tokens"):
        reinforce(config, _task(("a" * 20, "1")))


def test_examples_that_are_none_are_refused():
    class Returns(rl.Environment):
        def examples(self, split):
            return None

    with pytest.raises(UserError, match=r'Returns.examples\("train"\) returns None; it must yield rl.Example'):
        inspect.unwrap(examples_of)(Returns(), "train")


def test_generators_of_more_ranks_than_the_model_has_heads_are_refused_before_anything_is_written(tmp_path, folders):  # noqa: F811
    config = _config(tmp_path / "run", folders[0], actors=ActorsConfig(generators=1, tensor=8))
    with pytest.raises(UserError, match=r"(?s)generators do not fit.*actors.tensor 8 does not divide .*; set it to 1"):
        reinforce(config, EvenBytes())
    assert not (tmp_path / "run").exists()
