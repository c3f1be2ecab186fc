"""Tables of completions reach each tracker, and a tracker that takes none keeps its metrics."""

import html
import importlib
import json

import pytest

from lockstep.config import FaultConfig, ObserveConfig
from lockstep.observe import Observer, Table
from lockstep.observe.sinks import PATIENCE, BackgroundSink

ODD = "# no *heading* <script>alert(1)</script> | no `cell` &amp; [link](x)\n\n1. second \\ line"
TABLE = Table(("step", "prompt", "reward"), [(1, "2 + 2 =", 0.5), (1, ODD, -1.0)])


def test_tensorboard_shows_a_table_with_its_text_as_it_is(tmp_path):
    with Observer(ObserveConfig(tensorboard=True), FaultConfig(), tmp_path) as observer:
        observer.write_samples(1, "rollout/samples", TABLE)
        observer.write(1, {"loss": 2.5})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugin_util import markdown_to_safe_html

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [e.value for e in events.Scalars("loss")] == [2.5]
    (event,) = events.Tensors("rollout/samples/text_summary")
    page = markdown_to_safe_html(event.tensor_proto.string_val[0].decode())
    cells = [cell.split("</td>")[0].replace("<br>", "\n") for cell in page.split("<td>")[1:]]
    assert event.step == 1 and page.count("<th>") == 3
    assert [html.unescape(cell) for cell in cells] == ["1", "2 + 2 =", "0.5", "1", ODD, "-1"]
    assert not any("<" in cell for cell in cells), "text is no markup"


def test_weights_and_biases_keeps_a_table_with_the_steps_metrics(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "config.toml").write_text("steps = 1\n")
    for step in (1, 2):  # the second as if resumed
        with Observer(ObserveConfig(wandb=True), FaultConfig(), tmp_path) as observer:
            observer.write_samples(step, "rollout/samples", TABLE)
            observer.write(step, {"loss": 2.5})
    runs = list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert runs and len({path.name for path in runs}) == 1
    tables = [*(tmp_path / "wandb").glob("offline-run-*/files/media/table/rollout/samples_*.table.json")]
    assert len(tables) == 2
    for path in tables:
        assert json.loads(path.read_text()) == {"columns": [*TABLE.columns], "data": [[*row] for row in TABLE.rows]}


def test_trackio_keeps_a_table_at_its_step(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when trackio is imported
    pytest.importorskip("trackio")
    with Observer(ObserveConfig(trackio=True, project="tables"), FaultConfig(), tmp_path) as observer:
        observer.write_samples(1, "rollout/samples", TABLE)
        observer.write(1, {"loss": 2.5})
    logs = importlib.import_module("trackio.sqlite_storage").SQLiteStorage.get_logs("tables", tmp_path.name)
    rows = [dict(zip(TABLE.columns, row)) for row in TABLE.rows]
    assert [log["step"] for log in logs] == [1, 1] and logs[1]["loss"] == 2.5
    assert logs[0]["rollout/samples"]["_value"] == rows


def test_samples_are_due_in_the_first_step_and_every_few_or_never(tmp_path):
    def due(every):
        observer = Observer(ObserveConfig(samples_every=every), FaultConfig(), tmp_path)
        return [step for step in range(1, 10) if observer.samples_due(step)]

    assert due(4) == [1, 4, 8] and due(1) == [*range(1, 10)] and due(0) == []
    with Observer(ObserveConfig(tensorboard=True, samples_every=0), FaultConfig(), tmp_path) as observer:
        observer.write_samples(1, "validation/samples", TABLE)
    assert not any(b"samples" in path.read_bytes() for path in (tmp_path / "tensorboard").iterdir())


def test_a_tracker_that_takes_no_tables_is_named_once_and_keeps_its_metrics(tmp_path, caplog):
    class Tracker:
        metrics, tables = [], []

        def write(self, step, metrics):
            self.metrics.append(step)

        def write_table(self, step, name, table):
            self.tables.append(step)
            raise ValueError("no such type")

        def close(self):
            pass

    sink = BackgroundSink("wandb", Tracker, tmp_path)
    for step in range(1, 10):
        sink.write_table(step, "rollout/samples", TABLE)
        sink.write(step, {"loss": 1.0})
    sink.close()
    assert Tracker.metrics == [*range(1, 10)] and Tracker.tables == [*range(1, 1 + PATIENCE)]
    (message,) = caplog.messages
    assert "observe.wandb failed to write the table rollout/samples at step 3 (no such type)" in message
