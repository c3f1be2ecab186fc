"""A run that is killed while workers hold its conversations, and resumed, is the run that never was."""

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from lockstep.cli import main
from lockstep.config import CheckpointConfig, RewardConfig, to_toml
from lockstep.rl.reinforce import reinforce
from lockstep.rl.replay import NOT_COMPARED
from tests.checkpoint.runs import equal
from tests.rl.conversations.test_runs import config

TASK = """
import os, random, signal, time
from pathlib import Path
import lockstep.rl as rl

RUN, KILLED = Path(FOLDER), Path(FOLDER + ".killed")

class Talk(rl.ConversationEnvironment):
    def examples(self, split):
        for word in ("stone", "river", "cloud", "apple", "night", "paper"):
            yield rl.Example(prompt=word)

    async def converse(self, example, chat):
        chat.add(example.prompt)
        reply = await chat.reply()
        if (RUN / "checkpoints" / "step_00000001").exists() and not KILLED.exists():
            stat = Path(f"/proc/{os.getppid()}/stat").read_text()  # of the supervisor, whose parent is the trainer
            os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
            time.sleep(1000)
        drawn = random.random()
        if drawn < 0.2:
            os.kill(os.getppid(), signal.SIGKILL)
        chat.add(f"{drawn}, and again?")
        return {"drawn": drawn, "e": float((await chat.reply()).text.count("e"))}
"""


def records(folder):
    """All that a run has written of its steps but times: metrics, rollouts and validations."""
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    beginnings = tuple(name for name in NOT_COMPARED if name not in ("validation/", "alarm/"))
    kept = [{n: v for n, v in m.items() if not n.startswith(beginnings)} for m in metrics]
    return kept, {path.name: path.read_bytes() for path in sorted((folder / "rollouts").iterdir())}


def trained(folder):
    """Model and optimizer at the end. Python's own draws are left out: the tests' checker of types makes some."""
    last = folder / "checkpoints" / "step_00000003"
    return load_file(last / "model.safetensors") | load_file(last / "trainer" / "optimizer.safetensors")


@pytest.mark.slow
def test_a_run_that_is_killed_in_its_conversations_resumes_and_is_replayed_to_the_bit(tmp_path, chat_model):
    task, output = tmp_path / "talk.py", tmp_path / "run"
    task.write_text(TASK.replace("FOLDER", repr(str(output))))
    settings = config(
        output, chat_model("llama3"), f"{task}:Talk", steps=3, samples_per_prompt=4, max_new_tokens=6,
        validation_every=2, rewards=RewardConfig(workers=2, failure_limit=1.0),
        checkpoint=CheckpointConfig(every=1, keep_last=0, asynchronous=False),
    )  # fmt: skip
    (tmp_path / "run.toml").write_text(to_toml(settings))
    killed = subprocess.run([sys.executable, "-m", "lockstep", "rl", "--config", str(tmp_path / "run.toml")])
    assert killed.returncode == -signal.SIGKILL
    Path(f"{output}.killed").touch()
    assert main(["rl", "--output", str(output), "--resume"]) == 0

    whole = reinforce(replace(settings, output=str(tmp_path / "whole")))
    assert records(output) == records(whole)
    assert equal(trained(output), trained(whole))
    causes = [m.get("reward/failed/killed", 0) for m in records(whole)[0][1:]]
    assert 0 < sum(causes) < 24, "some conversations took a supervisor with them"
    for step in (1, 3):
        assert main(["replay", str(output), "--step", str(step), "--sample"]) == 0
