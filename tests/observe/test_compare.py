"""`lockstep compare` finds the first bit that differs."""

import json

import pytest

from lockstep.cli import main
from lockstep.errors import UserError
from lockstep.observe import compare_runs


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


def test_a_run_that_is_longer_is_not_equal(tmp_path, capsys):
    a, b = _run(tmp_path / "a", [3.0, 2.0]), _run(tmp_path / "b", [3.0, 2.0, 1.0])
    assert main(["compare", a, b]) == 1 and "only the second run has: 1" in capsys.readouterr().out


def test_reinforcement_runs_differ_by_what_they_sample_and_earn_even_where_no_loss_does(tmp_path, capsys):
    same = {"rollout/tokens": 40, "reward/mean": 0.5, "policy/entropy": 2.0}
    a = _run(tmp_path / "a", [0.0, 0.0], **same)
    for name in same:
        b = _run(tmp_path / name.partition("/")[0], [0.0, 0.0], **(same | {name: 1}))
        assert main(["compare", a, b]) == 1
        assert f"first {name}" in capsys.readouterr().out


def test_a_validation_that_one_run_lacks_is_a_difference(tmp_path):
    a, b = _run(tmp_path / "a", [0.0], **{"validation/reward": 0.5}), _run(tmp_path / "b", [0.0])
    assert main(["compare", a, a]) == 0 and main(["compare", a, b]) == 1


def test_a_folder_without_metrics_is_refused(tmp_path):
    with pytest.raises(UserError, match="has no metrics.jsonl"):
        compare_runs(tmp_path, tmp_path)
