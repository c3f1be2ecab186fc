"""Runs that end early: by what `on_metrics` raises, once the step is saved, or by a death that torchrun repairs."""

import pytest

import lockstep
from lockstep.checkpoint import newest_checkpoint
from lockstep.config import CheckpointConfig, RewardConfig, RLConfig
from lockstep.errors import UserError
from tests.parallel.launch import launch
from tests.train.runs import logged, text_run

TASK = """
import lockstep.rl as rl

class Vowels(rl.Environment):
    def examples(self, split):
        yield rl.Example(prompt="stone")
        yield rl.Example(prompt="river")
    def reward(self, example, completion):
        return float(sum(c in "aeiou" for c in completion))
"""


class Broken(Exception):
    """An error in the caller's own code."""


class Death(BaseException):
    """Of a process: unlike a callback's exception, it leaves no time to save."""


@pytest.fixture(params=["pretrain", "rl"])
def run(request, tmp_path, model_folder):
    """Runs four steps with a callback that raises `error` at a step; returns the steps that it saw."""
    (tmp_path / "task.py").write_text(TASK)

    def start(error=None, at=2, **settings):
        seen = []

        def on_metrics(step, metrics):
            seen.append(step)
            if error is not None and step == at:
                raise error

        if request.param == "pretrain":
            config = text_run(tmp_path, tokens_per_step=64, sequence_length=32, **settings)
            folder = lockstep.pretrain(config, on_metrics=on_metrics)
        else:
            config = RLConfig(
                output=str(tmp_path / "run"), steps=4, device="cpu", model=str(model_folder),
                environment=f"{tmp_path / 'task.py'}:Vowels", prompts_per_step=1, samples_per_prompt=2,
                max_new_tokens=4, validation_examples=1, rewards=RewardConfig(isolate="never"), **settings,
            )  # fmt: skip
            folder = lockstep.reinforce(config, on_metrics=on_metrics)
        assert folder == tmp_path / "run"
        return [step for step in seen if step]

    start.folder = tmp_path / "run"
    return start


def test_a_callbacks_exception_is_raised_as_it_is_once_its_step_is_saved(run):
    with pytest.raises(Broken) as raised:
        run(Broken("in the callback"))
    assert raised.traceback[-1].name == "on_metrics", "the traceback leads to the caller's line"
    assert newest_checkpoint(run.folder).name == "step_00000002"
    with pytest.raises(SystemExit):
        run(SystemExit(), at=4, resume=True)
    assert newest_checkpoint(run.folder).name == "step_00000004"
    resumed = logged(run.folder)
    assert run(lockstep.StopRun(), overwrite=True) == [1, 2], "without an error"
    assert (run.folder / "summary.json").is_file() and (run.folder / "report.html").is_file()
    assert run(resume=True) == [3, 4]
    assert logged(run.folder) == resumed


@pytest.mark.parametrize("run", ["rl"], indirect=True)
def test_a_callback_that_fails_before_the_first_step_ends_the_run_there(run):
    with pytest.raises(Broken):
        run(Broken(), at=0)
    assert run(lockstep.StopRun(), at=0, overwrite=True) == []
    assert run(lockstep.StopRun(), at=1, resume=True) == [1]


@pytest.mark.parametrize("run", [pytest.param("pretrain", marks=pytest.mark.slow), "rl"], indirect=True)
def test_a_run_that_torchrun_restarts_resumes_and_neither_refuses_nor_overwrites_itself(run, monkeypatch):
    def attempt(number, torchrun, *arguments, **settings):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", torchrun)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(number))
        return run(*arguments, checkpoint=CheckpointConfig(every=1, asynchronous=False), **settings)

    with pytest.raises(Death):
        attempt(0, "one", Death(), at=3)
    assert attempt(1, "one") == [3, 4]
    assert logged(run.folder, "step")[-4:] == [1, 2, 3, 4]
    for number in (0, 1):
        with pytest.raises(UserError, match="already contains a run"):
            attempt(number, "two")
    # And overwritten by a restart where the first attempt has not come so far.
    with pytest.raises(Death):
        attempt(1, "two", Death(), at=3, overwrite=True)
    assert attempt(2, "two", overwrite=True) == [3, 4]


def _on_two_ranks(folder):
    def on_metrics(step, metrics):
        if step == 2:
            raise Broken

    try:
        lockstep.pretrain(text_run(folder), on_metrics=on_metrics)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_the_other_ranks_end_with_the_one_that_has_the_callback(tmp_path):
    first, second = launch(2, _on_two_ranks, tmp_path)
    assert first == "Broken: "
    assert second.startswith("RunStopped:") and "an exception of on_metrics ended the run after step 2" in second
    assert newest_checkpoint(tmp_path / "run").name == "step_00000002"
