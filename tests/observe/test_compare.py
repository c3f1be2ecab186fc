"""`lockstep compare` finds the first bit that differs, the settings that do, and the best run."""

import json

import pytest

from lockstep.cli import main
from lockstep.config import PretrainConfig, TrainConfig, to_toml
from lockstep.errors import UserError
from lockstep.observe import compare_runs
from lockstep.observe.ranking import lower_is_better


def _run(folder, losses, **more):
    folder.mkdir()
    lines = [{"step": i + 1, "time": 0.1 * i, "loss": v, "grad_norm": 1.0, **more} for i, v in enumerate(losses)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


def test_runs_are_compared_bit_by_bit_and_within_a_tolerance(tmp_path, capsys):
    a = _run(tmp_path / "a", [3.0, 2.0, 1.0, None], tokens=1)
    # The next float64 after 2.0, then a visible difference; a loss that was not finite equals another such.
    b = _run(tmp_path / "b", [3.0, 2.0000000000000004, 1.01, None], tokens=2)
    assert main(["compare", a, a]) == 0 and "none" in capsys.readouterr().out
    assert main(["compare", a, b]) == 1
    out = capsys.readouterr().out
    assert "step 2" in out and "2.0000000000000004" in out and "9.90e-03 at step 3" in out
    assert main(["compare", a, b, "--tolerance", "1e-6"]) == 1 and main(["compare", a, b, "--tolerance", "0.1"]) == 0
    found = compare_runs(a, b)
    assert found.first_beyond("loss").step == 2 and found.first_beyond("loss", 1e-6).step == 3
    assert found.first_beyond("grad_norm") is None
    assert main(["compare", a, b, "--plot", str(tmp_path / "plot.png")]) == 1
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_is_longer_is_not_equal_and_a_folder_without_metrics_is_refused(tmp_path, capsys):
    with pytest.raises(UserError, match="has no metrics.jsonl"):
        compare_runs(tmp_path, tmp_path)
    a, b = _run(tmp_path / "a", [3.0, 2.0]), _run(tmp_path / "b", [3.0, 2.0, 1.0])
    assert main(["compare", a, b]) == 1 and "only the second run has: 1" in capsys.readouterr().out


def test_reinforcement_runs_differ_by_what_they_sample_and_earn_even_where_no_loss_does(tmp_path, capsys):
    same = {"rollout/tokens": 40, "reward/mean": 0.5, "policy/entropy": 2.0}
    a, lacks = _run(tmp_path / "a", [0.0, 0.0], **same), _run(tmp_path / "lacks", [0.0, 0.0])
    assert main(["compare", a, a]) == 0 and main(["compare", a, lacks]) == 1
    for name in same:
        b = _run(tmp_path / name.partition("/")[0], [0.0, 0.0], **(same | {name: 1}))
        assert main(["compare", a, b]) == 1
        assert f"first {name}" in capsys.readouterr().out


def _rows(out, start):
    """The table whose head begins with `start`, as words by the first word of each row."""
    lines = out[out.index(start) :].split("\n\n")[0].splitlines()
    return {line.split()[0]: line.split()[1:] for line in lines[1:]}


def test_each_of_several_runs_is_compared_with_the_first(tmp_path, capsys):
    a, b, c, d = (
        _run(tmp_path / name, losses)
        for name, losses in {"a": [3.0, 2.0, 1.0], "b": [3.0, 2.0, 1.0], "c": [3.0, 2.5, 1.5], "d": [3.0, 2.0]}.items()
    )
    assert main(["compare", a, b, c, d, "--plot", str(tmp_path / "plot.svg")]) == 1
    rows = _rows(capsys.readouterr().out, f"first different bit from {a}")
    assert rows == {
        b: ["none", "none", "3", "0", "0"],
        c: ["step", "2", "none", "3", "0", "0"],
        d: ["none", "none", "2", "1", "0"],
    }
    plot = (tmp_path / "plot.svg").read_text()
    assert all(f"<!-- {run} -->" in plot for run in (a, b, c, d))
    assert main(["compare", a, b, a]) == 0
    assert main(["compare", a, b, c, "--tolerance", "0.5"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["one", "two", "--tolerance", "nan"], "tolerance is nan; give a relative difference of 0 or more"),
        (["one", "two", "--plot", "x.foo"], "x.foo: a plot is .png, .svg, .pdf"),
        (["one", "two", "--plot", "nowhere/x.png"], "there is no folder nowhere"),
        (["one"], "two or more runs"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_is_compared(arguments, message, capsys):
    assert main(["compare", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_settings_that_differ_are_shown_by_their_names_on_the_command_line(tmp_path, capsys):
    def run(name, **settings):
        folder = _run(tmp_path / name, [1.0])
        config = PretrainConfig(output=folder, **settings)
        (tmp_path / name / "config.toml").write_text(to_toml(config))
        return folder

    long = "/data/" + 12 * "corpus/"
    a = run("a", train=TrainConfig(learning_rate=1e-3), data=long + "one.jsonl", resume=True)
    b = run("b", train=TrainConfig(learning_rate=2e-3), data=long + "two.jsonl")
    c = run("c", train=TrainConfig(learning_rate=1e-3), data=long + "one.jsonl", tokenizer="byte", steps=7)
    assert main(["compare", a, b, c]) == 0
    rows = _rows(capsys.readouterr().out, "settings that differ")
    steps = str(PretrainConfig().steps)
    assert rows.keys() == {"data", "train.learning-rate", "steps"}
    assert rows["train.learning-rate"] == ["0.001", "0.002", "0.001"] and rows["steps"] == [steps, steps, "7"]
    assert [value[-10:] for value in rows["data"]] == ['one.jsonl"', 'two.jsonl"', 'one.jsonl"']
    assert len(set(rows["data"])) == 2 and all(len(value) <= 41 for value in rows["data"])
    assert main(["compare", a, a]) == 0 and "train." not in capsys.readouterr().out
    d = _run(tmp_path / "d", [1.0])
    assert main(["compare", a, b, d]) == 0
    assert f"settings of {d}: not compared, its config.toml cannot be read" in capsys.readouterr().out


def test_runs_are_ranked_by_their_last_value_and_a_run_without_it_comes_last(tmp_path, capsys):
    a = _run(tmp_path / "a", [3.0, 1.0, 2.0])
    b = _run(tmp_path / "b", [3.0, 2.5, 1.5])
    c = _run(tmp_path / "c", [9.0], **{"validation/accuracy": 0.5})
    assert main(["compare", a, b, c, "--by", "loss"]) == 1
    out = capsys.readouterr().out
    assert "by loss (lower is better)" in out
    assert list(_rows(out, "by loss").items()) == [
        (b, ["1.5", "3", "1.5", "3"]), (a, ["2", "3", "1", "2"]), (c, ["9", "1", "9", "1"]),
    ]  # fmt: skip
    main(["compare", a, b, c, "--by", "validation/accuracy"])
    out = capsys.readouterr().out
    assert "by validation/accuracy (higher is better)" in out
    assert list(_rows(out, "by validation/accuracy").items()) == [
        (c, ["0.5", "1", "0.5", "1"]), (a, ["-", "-", "-", "-"]), (b, ["-", "-", "-", "-"]),
    ]  # fmt: skip
    main(["compare", a, b, "--by", "grad_norm"])
    assert _rows(capsys.readouterr().out, "by grad_norm (highest first; no best known)")[a] == ["1", "3", "-", "-"]
    assert main(["compare", a, b, "--by", "los"]) == 2
    assert 'no run has the metric "los". Did you mean "loss"?' in capsys.readouterr().err


def test_runs_are_ranked_by_validation_if_all_have_it(tmp_path, capsys):
    a = _run(tmp_path / "a", [1.0], **{"validation/accuracy": 0.1, "validation/reward": 0.2})
    b = _run(tmp_path / "b", [1.0], **{"validation/reward": 0.3})
    c = _run(tmp_path / "c", [1.0])
    for runs, metric in (((a, a), "validation/accuracy"), ((a, b), "validation/reward"), ((a, b, c), "loss")):
        main(["compare", *runs])
        assert f"\nby {metric} (" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lower", "names"),
    [
        (True, "loss validation/loss policy/kl time/generate memory_gib reward/failed/timeout rollout/truncated"),
        (False, "reward/mean reward/correct/mean validation/correct validation/pass@8 tokens_per_second mfu"),
        (None, "policy/entropy reward/std rollout/tokens_mean validation/scores/rejected learning_rate tokens/total"),
    ],
)
def test_which_direction_is_better_follows_from_the_metrics_name(lower, names):
    assert {name: lower_is_better(name) for name in names.split()} == dict.fromkeys(names.split(), lower)
