"""Runs that torchrun starts again, as they know it: by what it puts into their environment."""

import pytest

from lockstep.checkpoint import newest_checkpoint
from lockstep.config import CheckpointConfig, PretrainConfig, RewardConfig, RLConfig
from lockstep.errors import UserError
from lockstep.observe import read_metrics
from lockstep.rl.reinforce import reinforce
from lockstep.train.pretrain import pretrain

TASK = """
import lockstep.rl as rl

class Vowels(rl.Environment):
    def examples(self, split):
        yield rl.Example(prompt="stone")
        yield rl.Example(prompt="river")
    def reward(self, example, completion):
        return float(sum(c in "aeiou" for c in completion))
"""


class Death(BaseException):
    """Of a process: unlike a callback's exception, it leaves no time to save."""


@pytest.fixture(params=["pretrain", "rl"])
def start(request, tmp_path, model_folder, monkeypatch):
    """Starts a run whose rank dies in its third step, where `dies`, as torchrun does in its attempt of that number."""
    output, checkpoint = str(tmp_path / "run"), CheckpointConfig(every=1, asynchronous=False)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    (tmp_path / "task.py").write_text(TASK)

    def run(attempt, dies=False, torchrun="one", overwrite=False):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", torchrun)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        made = []

        def on_metrics(step, metrics):
            made.append(step)
            if dies and step == 3:
                raise Death

        if request.param == "pretrain":
            config = PretrainConfig(
                output=output, model="qwen3:micro", data=str(tmp_path / "text.txt"), tokens_per_step=64,
                sequence_length=32, steps=4, checkpoint=checkpoint, overwrite=overwrite, device="cpu",
            )  # fmt: skip
            pretrain(config, on_metrics=on_metrics)
        else:
            config = RLConfig(
                output=output, model=str(model_folder), environment=f"{tmp_path / 'task.py'}:Vowels", steps=4,
                prompts_per_step=1, samples_per_prompt=2, max_new_tokens=4, validation_examples=1, device="cpu",
                checkpoint=checkpoint, overwrite=overwrite, rewards=RewardConfig(isolate="never"),
            )  # fmt: skip
            reinforce(config, on_metrics=on_metrics)
        return [step for step in made if step]

    run.folder = tmp_path / "run"
    return run


def test_a_restarted_run_resumes_and_neither_refuses_nor_overwrites_itself(start):
    for overwrite in (False, True):
        with pytest.raises(Death):
            start(0, dies=True, overwrite=overwrite)
        assert start(1, overwrite=overwrite) == [3, 4]
        assert [m["step"] for m in read_metrics(start.folder / "metrics.jsonl")][-4:] == [1, 2, 3, 4]
        assert newest_checkpoint(start.folder).name == "step_00000004"


def test_what_another_start_has_left_is_refused_by_every_attempt(start):
    start(0, torchrun="one")
    for attempt in (0, 1):
        with pytest.raises(UserError, match="already contains a run"):
            start(attempt, torchrun="two")
    # And overwritten by a restart where the first attempt has not come so far.
    assert start(1, torchrun="two", overwrite=True) == [1, 2, 3, 4]
