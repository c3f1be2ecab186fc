"""The run's folder: refused where it would destroy something, readable when interrupted, safe with hostile text."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys

import pytest

from lockstep.cli import main
from lockstep.config import ParallelConfig
from lockstep.errors import RunStopped, UserError
from lockstep.observe import MetricsWriter, claim_run, curves_png, open_run, read_metrics, write_report
from lockstep.observe.curves import curves_svg
from lockstep.parallel import close_world, open_world
from tests.parallel.launch import launch


def test_a_folder_is_never_taken_from_its_owner(tmp_path):
    run = open_run(str(tmp_path / "run"), "a = 1\n")
    with pytest.raises(UserError, match=r"already contains a run.*--resume.*--overwrite"):
        open_run(str(tmp_path / "run"), "a = 2\n")
    assert (run.path / "config.toml").read_text() == "a = 1\n"
    open_run(str(tmp_path / "run"), "a = 3\n", overwrite=True)
    assert (run.path / "config.toml").read_text() == "a = 3\n"
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    (tmp_path / "thesis" / "config.toml").write_text('base = "https://example.org"')  # many programs have one
    with pytest.raises(UserError, match="is not empty and is not a run's folder"):
        open_run(str(tmp_path / "thesis"), "", overwrite=True)
    (run.path / "notes.txt").write_text("weeks of work")
    with pytest.raises(UserError, match=r"run: contains files that no run wrote \(notes.txt\); move them"):
        open_run(str(tmp_path / "run"), "", overwrite=True)
    assert sorted(p.name for p in run.path.iterdir()) == ["checkpoints", "config.toml", "notes.txt"]
    with pytest.raises(UserError, match="is a file"):
        open_run(str(tmp_path / "thesis" / "chapter.tex"), "")
    new = open_run(str(tmp_path / "new"), "a = 4\n", resume=True)
    assert (new.path / "config.toml").read_text() == "a = 4\n"


HOLDER = """
import sys, time
from lockstep.observe import claim_run
with claim_run(sys.argv[1], "a = 1"):
    print("claimed", flush=True)
    time.sleep(120)
"""


def test_a_folder_in_which_a_run_lives_is_refused_by_name_until_its_process_is_gone(tmp_path):
    run = tmp_path / "run"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(run)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "claimed\n"
        for how in (dict(resume=True), dict(overwrite=True)):
            with (
                pytest.raises(UserError, match=rf"run: another run is writing to it \(process {holder.pid} on "),
                claim_run(str(run), "a = 2", **how),
            ):
                pass
        assert (run / "config.toml").read_text() == "a = 1"
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with claim_run(str(run), "a = 1", resume=True):
            assert (run / ".lock").read_text().startswith(f"process {os.getpid()} on ")
        assert not (run / ".lock").exists()
        with claim_run(str(run), "a = 3", overwrite=True):
            pass
        assert (run / "config.toml").read_text() == "a = 3"
    finally:
        holder.kill()


def test_where_the_file_system_cannot_lock_a_run_starts_with_a_warning(tmp_path, caplog, monkeypatch):
    def refuse(descriptor, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with claim_run(str(tmp_path / "run"), ""):
        assert "run: cannot be locked ([Errno 37] No locks available); make sure that no other run" in caplog.text


def test_a_start_that_fails_before_its_first_step_leaves_no_folder(tmp_path):
    def fail(path, before=lambda run: None, **how):
        with pytest.raises(ZeroDivisionError), claim_run(str(path), "", **how) as run:
            MetricsWriter(run.path).__enter__()
            before(run)
            raise ZeroDivisionError

    fail(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "made").mkdir()
    fail(tmp_path / "made")
    assert list((tmp_path / "made").iterdir()) == []
    fail(tmp_path / "begun", lambda run: run.metrics.write_text('{"step": 1}'))
    assert (tmp_path / "begun" / "metrics.jsonl").is_file()
    with claim_run(str(tmp_path / "idle"), ""):
        pass
    fail(tmp_path / "idle", resume=True)
    assert (tmp_path / "idle" / "config.toml").is_file(), "a run that was there stays"


def _open_on_two_ranks(output):
    world = open_world(ParallelConfig(), "cpu")
    try:
        world.on_main(lambda: open_run(output, ""))
    except UserError as error:
        return str(error)
    finally:
        close_world(world)


def test_where_the_main_rank_is_refused_all_are(tmp_path):
    assert launch(2, _open_on_two_ranks, str(tmp_path / "run")) == [None, None]
    first, second = launch(2, _open_on_two_ranks, str(tmp_path / "run"))
    assert first == second and "already contains a run" in first


def test_damaged_lines_of_the_metrics_do_not_keep_a_run_from_resuming(tmp_path, caplog):
    run = open_run(str(tmp_path / "run"), "")
    large = b'{"step": 1%s}\n' % (b"0" * 400)
    run.metrics.write_bytes(b'{"step": 1}\n{"step"\xff: 2}\n{"step": 3}\n' + large + b'{"step": 4}\n{"st')
    run.truncate(3)
    assert run.metrics.read_text() == '{"step": 1}\n{"step": 3}\n' and "2 damaged lines" in caplog.text


def test_what_runs_write_is_known_and_deleted_and_nothing_else(tmp_path):
    """All that is in the folder of a run with all its extras may be overwritten."""
    options = ["--model", "qwen3:micro", "--steps", "2", "--tokens-per-step", "256", "--sequence-length", "64"]
    options += ["--observe.tensorboard", "--observe.profile-steps", "1", "2", "--validation-every", "1"]
    (tmp_path / "a.txt").write_text("some text\n" * 300)
    options += ["--data", str(tmp_path / "a.txt"), "--validation-data", str(tmp_path / "a.txt")]
    assert main(["pretrain", "--output", str(tmp_path / "run"), *options]) == 0
    assert len(list((tmp_path / "run").iterdir())) > 7
    open_run(str(tmp_path / "run"), "", overwrite=True)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"checkpoints", "config.toml"}


def test_metrics_are_json_lines_and_a_torn_last_line_is_left_out(tmp_path):
    run = open_run(str(tmp_path / "run"), "")
    with MetricsWriter(run.path) as writer:
        writer.write(1, {"loss": 2.5})
        writer.write(2, {"loss": float("nan")})
    with run.metrics.open("a") as file:
        file.write('{"step": 3, "lo')
    metrics = read_metrics(run.metrics)
    assert [m["step"] for m in metrics] == [1, 2] and [m["loss"] for m in metrics] == [2.5, None]
    run.truncate(1)
    assert [m["step"] for m in read_metrics(run.metrics)] == [1]


def test_metrics_are_added_to_the_last_line(tmp_path):
    run = open_run(str(tmp_path / "run"), "")
    with MetricsWriter(run.path) as writer:
        for step in (1, 2):
            writer.write(step, {"loss": float("nan")})
        before = read_metrics(run.metrics)
        writer.extend(before[1], {"validation/loss": 3.0, "alarm/kl": float("inf")})
        writer.write(3, {"loss": 1.0})
        found = read_metrics(run.metrics)
        assert found[:2] == [before[0], before[1] | {"validation/loss": 3.0, "alarm/kl": None}]
        assert found[1]["loss"] is None and found[2]["step"] == 3
        run.metrics.with_suffix(".partial").mkdir()  # nothing can be written there
        with pytest.raises(RunStopped, match="the metrics of step 3 cannot be written"):
            writer.extend(found[2], {"validation/loss": 3.0})
    assert read_metrics(run.metrics) == found


def test_a_report_shows_what_there_is(tmp_path):
    run = open_run(str(tmp_path / "run"), "")
    assert "<h1>empty</h1>" in write_report(run.path, "empty").read_text()
    with MetricsWriter(run.path) as writer:
        for step in range(1, 30):
            writer.write(step, {"reward/mean": step / 30, "reward/$a^$/mean": 0.5, "parity/tokens_checked": 10,
                                "parity/tokens_different": 0, "parity/max_delta": 0.0})  # fmt: skip
    page = write_report(run.path, "a run").read_text()
    assert "<svg" in page and ">290</td>" in page
    assert "so the gradient of the first update on each batch is exactly on policy" in page, "the meaning of a 0"
    assert "before and after" not in page, "without a second validation there is nothing to compare"
    curves_png(run.path, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_report_shows_the_same_prompts_before_and_after(tmp_path):
    run = open_run(str(tmp_path / "run"), "")
    run.validation_path(0).parent.mkdir()
    for step, completion, reward in ((0, "9", 0.0), (10, "8", 1.0), (20, "10", 1.0)):
        lines = [{"prompt": f"{n}+5=", "answer": "10", "completion": f"{completion}\n", "rewards": {"correct": reward},
                  "reward": reward, "group": n} for n in range(40)]  # fmt: skip
        run.validation_path(step).write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {"accuracy_before": 0.0, "accuracy_after": 1.0, "reward_before": 0.0, "reward_after": 1.0,
               "seconds": {"pretrain": 100.0, "rl": 75.0},
               "tokens": {"pretrained": 400_000, "generated": 9_000, "trained": 50_000}}  # fmt: skip
    run.summary.write_text(json.dumps(summary))
    page = write_report(run.path, "a run").read_text()
    table = page[page.index("before and after</h2>") :]
    assert table.count('<tr class="good">') == 12, "a dozen of the prompts"
    assert ">9⏎</td>" in table and ">10⏎</td>" in table and ">8⏎</td>" not in table, "the first and the last validation"
    assert "<th>correct</th>" in table, "the reward by the environment's own name"
    assert "2 min 55 s" in page and "450,000" in page and "since step" not in page
    run.summary.write_text(json.dumps(summary | {"resumed_from": 7}))
    page = write_report(run.path, "a run").read_text()
    assert "since step 7" in page


def test_what_is_drawn_depends_on_what_was_measured(tmp_path):
    pretrain, rl = (open_run(str(tmp_path / name), "") for name in ("pretrain", "rl"))
    with MetricsWriter(pretrain.path) as writer:
        for step in (1, 2):
            writer.write(step, {"loss": 2.0, "skipped_steps": 0})
    with MetricsWriter(rl.path) as writer:
        for step in (1, 2):
            rewards = ("reward/mean", "reward/correct/mean", "validation/accuracy", "validation/reward")
            writer.write(step, {"loss": 1e-4, **dict.fromkeys(rewards, 0.5)})
    assert [curve.title for curve in curves_svg(pretrain.path)] == ["Loss"]
    assert [curve.title for curve in curves_svg(rl.path)] == ["Reward", "Held-out accuracy"], "no picture twice"
    assert all(curve.meaning.endswith(".") and "<text" in curve.svg for curve in curves_svg(rl.path))
    page = write_report(rl.path, "both", "An introduction.", pretraining=pretrain.path).read_text()
    assert "Loss in pretraining" in page and "An introduction." in page and len(page) < 5e6
