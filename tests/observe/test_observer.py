"""Everything that watches a run: switched on by setting, and put back when the run ends."""

import gc
import json
import logging
import sys

import pytest
import torch

from lockstep.config import FaultConfig, ObserveConfig, PretrainConfig, from_toml, to_toml
from lockstep.errors import UserError
from lockstep.observe import Observer, read_metrics, require_observers
from lockstep.observe.logs import open_logs


def test_garbage_is_collected_at_chosen_steps_only(tmp_path):
    class Node:
        pass

    def cycle():
        node = Node()
        node.self = node

    def alive():
        return sum(isinstance(o, Node) for o in gc.get_objects())

    with Observer(ObserveConfig(gc_every=3), FaultConfig(), tmp_path) as observer:
        assert not gc.isenabled()
        counts = []
        for step in range(1, 7):
            with observer.step(step):
                cycle()
            counts.append(alive())
    assert counts == [1, 2, 0, 1, 2, 0]
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_determinism_lasts_as_long_as_the_run(tmp_path):
    with Observer(ObserveConfig(deterministic=True, gc_every=0), FaultConfig(), tmp_path):
        assert torch.are_deterministic_algorithms_enabled()
        with pytest.raises(RuntimeError, match="deterministic"):
            torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2))
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_chosen_step_is_profiled(tmp_path):
    with Observer(ObserveConfig(profile_steps=(2,), gc_every=0), FaultConfig(), tmp_path) as observer:
        for step in (1, 2, 3):
            with observer.step(step), observer.timeline.span("forward"):
                torch.ones(8, 8) @ torch.ones(8, 8)
    (trace,) = (tmp_path / "profile").glob("*.json")
    names = {e.get("name") for e in json.loads(trace.read_text())["traceEvents"]}
    assert trace.name == "step_00000002_rank_0.json" and {"forward", "aten::mm"} <= names
    assert "aten::mm" in trace.with_suffix(".txt").read_text()


def test_what_a_machine_cannot_show_is_refused_with_what_to_do(monkeypatch):
    with pytest.raises(UserError, match="memory_snapshot_steps needs a CUDA device"):
        require_observers(ObserveConfig(memory_snapshot_steps=(1,)), torch.device("cpu"))
    for name in ("tensorboard", "wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(UserError, match=f"pip install {name}"):
            require_observers(ObserveConfig(**{name: True}), torch.device("cpu"))
    require_observers(ObserveConfig(), torch.device("cpu"))


def test_each_rank_has_a_separate_log_with_its_error(tmp_path):
    log = logging.getLogger("lockstep")
    for rank in (0, 1):
        with pytest.raises(ValueError), open_logs(tmp_path, rank, 2):
            log.info("hello from %d", rank)
            raise ValueError("something else")
    text = (tmp_path / "logs" / "rank_1.log").read_text()
    assert "rank 1 INFO: hello from 1" in text and "hello from 0" not in text
    assert "rank 1 ERROR: ended by ValueError('something else')" in text and "Traceback" in text
    with open_logs(tmp_path / "alone"):
        log.info("to the terminal only")
    assert not (tmp_path / "alone").exists() and log.level == logging.NOTSET and not log.handlers


def test_the_terminal_shows_requested_metrics_next_to_the_defaults(tmp_path):
    chosen = ("time/*", "loss", "nothing", "validation/*")
    config = PretrainConfig(observe=ObserveConfig(terminal=chosen, profile_steps=(3, 10), wandb=True))
    metrics = {"loss": 2.5, "validation/loss": 3.0, "time/train": 0.25, "tokens": 7.0, "time/step": 1.0}
    shown = Observer(ObserveConfig(terminal=chosen), FaultConfig(), tmp_path).for_terminal(metrics)
    assert shown == {"time/train": 0.25, "time/step": 1.0, "loss": 2.5}
    assert Observer(ObserveConfig(), FaultConfig(), tmp_path).for_terminal(metrics) == {}
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert from_toml(tmp_path / "config.toml", PretrainConfig()) == config, "a list of settings survives the file"


def test_tokens_are_totalled_over_resumed_and_rewound_steps(tmp_path):
    seen = []

    def note(step, metrics):
        seen.append(metrics)

    for steps in ((0, 1, 2), (3, 4)):  # the second time as if resumed
        with Observer(ObserveConfig(gc_every=0), FaultConfig(), tmp_path, on_metrics=note) as observer:
            for step in steps:
                observer.write(step, {"tokens": 10 * step} if step else {"validation/reward": 0.5})
    assert [m.get("tokens/total") for m in read_metrics(tmp_path / "metrics.jsonl")] == [None, 10, 30, 60, 100]
    assert [m.get("tokens/total") for m in seen] == [None, 10, 30, 60, 100]
    with Observer(
        ObserveConfig(terminal=("tokens/*",), gc_every=0), FaultConfig(), tmp_path, on_metrics=note
    ) as observer:
        observer.extend(read_metrics(tmp_path / "metrics.jsonl")[-1], {"validation/loss": 2.5})
        assert seen[-1]["tokens/total"] == 100 and seen[-1]["validation/loss"] == 2.5, "a validation that is made up"
        observer.rewind(2)
        observer.write(3, {"tokens": 1})
        assert observer.for_terminal({"tokens": 1}) == {"tokens/total": 31}
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["tokens/total"] == 31
