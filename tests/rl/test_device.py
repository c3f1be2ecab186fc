"""Trainer, reference, engine and batches of a reinforcement run live on one device."""

import json
import tomllib

import torch

from lockstep.config import RLConfig
from lockstep.model import arithmetic_of
from lockstep.rl.algorithms import PolicyLossInputs, policy_loss
from lockstep.rl.environments.protocol import Example
from lockstep.rl.reinforce import reinforce
from lockstep.rl.rollouts.records import Rollout, Scores
from tests.rl.losses import batches_of


def test_a_batch_and_its_loss_are_on_the_device_that_is_given():
    """The meta device stands for one that is not there: nothing of the batch stays on the CPU."""
    example = Example(prompt="p", answer="a")
    rollouts = [
        Rollout(example, 0, [1, 2, 3], [4] * n, [-0.5] * n, "stop", "text", 0, scores=Scores(advantage=1.0))
        for n in (2, 5)
    ]
    (batch,) = batches_of(rollouts, RLConfig(model="m"), device="meta")
    tensors = [batch.old_log_probs, batch.advantages, batch.weights, batch.row.tokens, batch.row.targets]
    assert {t.device.type for t in tensors} == {"meta"} and len(batch.old_log_probs) == 7
    log_probs = torch.empty(7, device="meta", requires_grad=True)
    inputs = PolicyLossInputs(log_probs, batch.old_log_probs, batch.advantages, batch.weights, batch.old_log_probs)
    loss, metrics = policy_loss(inputs, 0.2, 0.2, kl_coefficient=0.1)
    assert {loss.device.type, *(m.device.type for m in metrics.values())} == {"meta"}


def test_a_run_on_a_given_device_takes_the_models_dtype_and_records_its_arithmetic(tmp_path, model_folder, capsys):
    config = RLConfig(
        output=str(tmp_path / "run"), model=str(model_folder), steps=1, prompts_per_step=2, samples_per_prompt=2,
        max_new_tokens=4, validation_examples=2, kl_coefficient=0.1, device="cpu", environment="digit_sum",
    )  # fmt: skip
    folder = reinforce(config)
    recorded = tomllib.loads((folder / "config.toml").read_text())
    arithmetic = arithmetic_of(torch.device("cpu"))
    assert (recorded["device"], recorded["dtype"], recorded["arithmetic"]) == ("cpu", "bfloat16", arithmetic)
    assert json.loads((folder / "summary.json").read_text())["arithmetic"] == arithmetic
    said = capsys.readouterr().err
    assert "dtype auto: bfloat16, the folder's own" in said and f"| bfloat16, {arithmetic} arithmetic | " in said
    assert said.rstrip().endswith("4 samples to go, of up to 4 tokens") and config.dtype == "auto"
