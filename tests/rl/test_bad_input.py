"""What a run is given wrongly, or loses on its way: an end with the cause, or a warning and a run that continues."""

import itertools
import resource
import threading

import pytest

import lockstep.rl as rl
from lockstep.config import ActorsConfig, EngineConfig, ObserveConfig
from lockstep.errors import RunStopped, UserError
from lockstep.observe import read_metrics, sinks
from lockstep.observe.sinks import PATIENCE, BackgroundSink
from lockstep.rl.reinforce import reinforce
from lockstep.rl.rollouts import prompts
from lockstep.rl.rollouts.prompts import examples_of
from tests.rl.small_runs import EvenBytes, small_config


class Task(rl.Environment):
    def __init__(self, *given):
        super().__init__()
        self.given = given

    def examples(self, split):
        yield from (rl.Example(*one) for one in self.given)


def test_examples_without_end_and_none_at_all_are_refused(monkeypatch):
    class Endless(rl.Environment):
        def examples(self, split):
            yield from (rl.Example(str(n)) for n in itertools.count())

    monkeypatch.setattr(prompts, "MOST_EXAMPLES", 1000)
    with pytest.raises(UserError, match=r'Endless.examples\("train"\) yields more than 1,000 examples, or never'):
        examples_of(Endless(), "train")
    with pytest.raises(UserError, match=r'Task.examples\("train"\) yields nothing; it must yield rl.Example'):
        examples_of(Task(), "train")


def test_examples_that_are_there_twice_are_counted_and_an_id_that_is_names_them(caplog):
    assert len(examples_of(Task(("a", "1"), ("a", "2"), ("b", "1")), "train")) == 3
    assert not caplog.messages, "another answer makes another example"
    assert len(examples_of(Task(("a", "1"), ("b", "1"), ("a", "1"), ("a", "1")), "train")) == 4
    assert caplog.messages == ["Task.examples(\"train\") yields 2 of 4 examples again, such as 'a'"]
    caplog.clear()
    examples_of(Task(("a", "", "x"), ("b", "", "y"), ("c", "", "x")), "validation")
    assert caplog.messages == ["Task.examples(\"validation\") yields the same id for several examples: 'x'"]


def test_a_full_disk_ends_the_run_with_the_file_and_whole_metrics(tmp_path, folders):
    metrics = tmp_path / "run/metrics.jsonl"
    config = small_config(tmp_path / "run", folders[0], samples_per_prompt=32, max_new_tokens=16, steps=3)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(step, _):
        """The system refuses to write larger files, as a full disk does."""
        if step == 2:  # a little more than the metrics: the rollouts, and the timeline at the end, do not fit
            resource.setrlimit(resource.RLIMIT_FSIZE, (metrics.stat().st_size + 100, unlimited[1]))

    try:
        with pytest.raises(
            RunStopped, match=r"step_00000002.jsonl: the rollouts cannot be written \(File too"
        ) as ended:
            reinforce(config, EvenBytes(), on_metrics=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert ended.value.exit_code == 1 and [m["step"] for m in read_metrics(metrics)] == [0, 1, 2]
    names = sorted(path.name for path in (tmp_path / "run/rollouts").iterdir())
    assert names == ["step_00000001.jsonl", "validation_00000000.jsonl"], "nothing half-written is left"
    assert not (tmp_path / "run/timeline.json").exists()


def test_a_tracker_that_cannot_be_opened_is_named_and_the_run_continues(tmp_path, folders, caplog):
    """Where TensorBoard wants a folder of its own there is a file."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.toml").write_text("environment = 'digit_sum'\n")
    (tmp_path / "run" / "tensorboard").write_text("a file, no folder")
    config = small_config(tmp_path / "run", folders[0], resume=True, steps=1, observe=ObserveConfig(tensorboard=True))
    reinforce(config, EvenBytes())
    said = [message for message in caplog.messages if "observe.tensorboard could not be opened" in message]
    assert len(said) == 1 and "the run continues without it; metrics.jsonl" in said[0]
    assert [m["step"] for m in read_metrics(tmp_path / "run/metrics.jsonl")] == [0, 1]


def test_a_tracker_that_fails_gets_no_more_steps_after_a_few_times(tmp_path, caplog):
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
    sink = BackgroundSink("wandb", lambda: tracker, tmp_path)
    for step in range(1, 12):
        sink.write(step, {"loss": 1.0})
    sink.close()
    assert tracker.tried == [*range(1, 4 + PATIENCE)], "steps 1, 2 and 3, and then three in a row"
    first, second = caplog.messages
    assert "observe.wandb could not be written to at step 6 (no route to host), and the run continues" in first
    assert "observe.wandb could not be closed (nobody answers)" in second


def test_a_tracker_that_never_returns_delays_nothing(tmp_path, caplog, monkeypatch):
    stuck, never = threading.Event(), threading.Event()

    class Tracker:
        def write(self, step, metrics):
            stuck.set()
            never.wait(30)

    monkeypatch.setattr(sinks, "MAX_QUEUED", 5)
    monkeypatch.setattr(sinks, "CLOSE_SECONDS", 0.1)
    sink = BackgroundSink("wandb", Tracker, tmp_path)
    sink.write(1, {"loss": 1.0})
    assert stuck.wait(60)
    for step in range(2, 10):
        sink.write(step, {"loss": 1.0})
    sink.close()
    never.set()
    behind, abandoned, missing = caplog.messages
    assert behind.startswith("observe.wandb is 5 steps behind at step 7, and drops steps until it catches up")
    assert abandoned.startswith("observe.wandb did not finish within 0.1 s and is abandoned")
    assert missing.startswith("observe.wandb was too slow: 3 steps are missing in it")


def test_a_prompt_that_does_not_fit_names_its_example(tmp_path, folders):
    config = small_config(tmp_path / "run", folders[0], engine=EngineConfig(max_sequences=2, cache_tokens=16))
    said = r"example 'a+': its prompt of 20 tokens and max_new_tokens 5 do not fit in the cache of 16 tokens; raise"
    with pytest.raises(UserError, match=said + " engine.cache_tokens"):
        reinforce(config, Task(("a" * 20, "1")))
    with pytest.raises(UserError, match="example 'a+.* its prompt of .* context of 64"):
        reinforce(small_config(tmp_path / "run", folders[0]), Task(("a" * 70, "1")))


def test_generators_of_more_ranks_than_the_model_has_heads_are_refused_before_anything_is_written(tmp_path, folders):
    config = small_config(tmp_path / "run", folders[0], actors=ActorsConfig(generators=1, tensor=8))
    with pytest.raises(UserError, match=r"(?s)generators do not fit.*actors.tensor 8 does not divide .*; set it to 1"):
        reinforce(config, EvenBytes())
    assert not (tmp_path / "run").exists()
