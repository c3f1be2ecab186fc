"""The timeline opens in a trace viewer, and the metrics' times come from it."""

import json
import time

import pytest

from lockstep.observe import Timeline, merge_timelines
from lockstep.observe.timeline import timeline_path


def _rank(run, rank, ranks):
    timeline = Timeline(rank, steps=2)
    for step in (1, 2, 3):
        timeline.begin(step)
        with timeline.span("forward"):
            time.sleep(0.002)
        with timeline.span("validation"), timeline.span("forward"):
            pass
    timeline.write(timeline_path(run, rank, ranks))
    return timeline


def test_the_last_steps_of_all_ranks_are_one_trace(tmp_path):
    for rank in (0, 1):
        _rank(tmp_path, rank, 2)
    merge_timelines(tmp_path)
    assert not (tmp_path / "timeline").exists()
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    # What Chrome's format asks of a complete event, in microseconds; metadata names the processes.
    spans = [e for e in events if e["ph"] == "X"]
    assert all({"name", "ts", "dur", "pid", "tid"} <= e.keys() and e["dur"] >= 0 for e in spans)
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {"rank 0", "rank 1"}
    assert {(e["pid"], e["args"]["step"]) for e in spans} == {(0, 2), (0, 3), (1, 2), (1, 3)}
    assert abs(spans[0]["ts"] / 1e6 - time.time()) < 60
    # A phase within another lies within its time, which is how viewers stack them.
    inner, outer = spans[1], spans[2]
    assert outer["name"] == "validation" and outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def test_one_rank_writes_the_trace_itself(tmp_path):
    timeline = _rank(tmp_path, 0, 1)
    assert (tmp_path / "timeline.json").is_file()
    assert 0.002 <= timeline.seconds("forward") < timeline.elapsed() and timeline.seconds("backward") == 0


def test_a_phase_that_fails_keeps_its_name_for_whoever_asks():
    timeline = Timeline()
    timeline.begin(7)
    with pytest.raises(ZeroDivisionError), timeline.span("backward"):
        raise ZeroDivisionError
    assert (timeline.step, timeline.phase) == (7, "backward")
