"""What a caller's `on_metrics` raises ends the run, once its step is saved."""

import pytest

import lockstep
from lockstep.checkpoint import newest_checkpoint
from lockstep.config import PretrainConfig, RewardConfig, RLConfig
from lockstep.observe import read_metrics
from tests.parallel.launch import launch
from tests.train.test_restarts import TASK


class Broken(Exception):
    """An error in the caller's own code."""


@pytest.fixture(params=["pretrain", "rl"])
def run(request, tmp_path, model_folder):
    """Runs four steps with a callback; keeps its steps in `seen`."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    (tmp_path / "task.py").write_text(TASK)
    shared = {"output": str(tmp_path / "run"), "steps": 4, "device": "cpu"}

    def start(error=None, at=2, **settings):
        seen = []

        def on_metrics(step, metrics):
            seen.append(step)
            if error is not None and step == at:
                raise error

        if request.param == "pretrain":
            config = PretrainConfig(
                **shared, **settings, model="qwen3:micro", data=str(tmp_path / "text.txt"), tokens_per_step=64,
                sequence_length=32,
            )  # fmt: skip
            folder = lockstep.pretrain(config, on_metrics=on_metrics)
        else:
            config = RLConfig(
                **shared, **settings, model=str(model_folder), environment=f"{tmp_path / 'task.py'}:Vowels",
                prompts_per_step=1, samples_per_prompt=2, max_new_tokens=4, validation_examples=1,
                rewards=RewardConfig(isolate="never"),
            )  # fmt: skip
            folder = lockstep.reinforce(config, on_metrics=on_metrics)
        assert folder == tmp_path / "run"
        return [step for step in seen if step]

    start.folder = tmp_path / "run"
    return start


def losses(run):
    return [m["loss"] for m in read_metrics(run.folder / "metrics.jsonl") if m["step"]]


def test_a_callbacks_exception_is_raised_as_it_is_once_its_step_is_saved(run):
    with pytest.raises(Broken) as raised:
        run(Broken("in the callback"))
    assert raised.traceback[-1].name == "on_metrics", "the traceback leads to the caller's line"
    assert newest_checkpoint(run.folder).name == "step_00000002"
    assert run(resume=True) == [3, 4]
    resumed = losses(run)
    run(overwrite=True)
    assert losses(run) == resumed, "the interrupted run went on with the bits of a whole one"


@pytest.mark.parametrize("error", [Broken, SystemExit])
def test_an_exception_after_the_last_step_is_raised_too(run, error):
    with pytest.raises(error):
        run(error(), at=4)
    assert newest_checkpoint(run.folder).name == "step_00000004"


def test_stop_run_ends_a_run_without_an_error_and_it_can_go_on(run):
    assert run(lockstep.StopRun()) == [1, 2]
    assert newest_checkpoint(run.folder).name == "step_00000002"
    assert (run.folder / "summary.json").is_file() and (run.folder / "report.html").is_file()
    assert run(resume=True) == [3, 4]


@pytest.mark.parametrize("run", ["rl"], indirect=True)
def test_a_callback_that_fails_before_the_first_step_ends_the_run_there(run):
    with pytest.raises(Broken):
        run(Broken(), at=0)
    assert run(lockstep.StopRun(), at=0, overwrite=True) == []
    assert run(resume=True) == [1, 2, 3, 4]


def _on_two_ranks(folder, error):
    def on_metrics(step, metrics):
        if step == 2:
            raise error

    config = PretrainConfig(
        output=str(folder / "run"), model="qwen3:micro", data=str(folder / "text.txt"), tokens_per_step=64,
        sequence_length=32, steps=4, device="cpu",
    )  # fmt: skip
    try:
        lockstep.pretrain(config, on_metrics=on_metrics)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("error", [Broken, lockstep.StopRun])
def test_the_other_ranks_end_with_the_one_that_has_the_callback(tmp_path, error):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    first, second = launch(2, _on_two_ranks, tmp_path, error)
    if error is Broken:
        assert first == "Broken: "
        assert second.startswith("RunStopped:") and "an exception of on_metrics ended the run after step 2" in second
    else:
        assert (first, second) == (None, None)
    assert newest_checkpoint(tmp_path / "run").name == "step_00000002"
