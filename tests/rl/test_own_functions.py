"""A loss and advantages from the user's files: the bits of ours, refused when wrong, and kept with the run."""

import json
import os
from pathlib import Path

import pytest
import torch

import lockstep.rl as rl
from lockstep.checkpoint import load_model
from lockstep.config import CheckpointConfig, TrainConfig
from lockstep.errors import UserError
from lockstep.python_file import import_file, source_of
from lockstep.rl.reinforce import reinforce
from lockstep.rl.replay import NOT_COMPARED, replay
from tests.parallel.launch import launch
from tests.rl.small_runs import EvenBytes, rollouts_of, small_config, steps_of

EXAMPLE = Path(__file__).parents[2] / "examples/gspo_loss.py"
GSPO = dict(algorithm="gspo", updates_per_batch=2, validation_examples=0)
EVERY = CheckpointConfig(every=1, keep_last=0, last_model_only=False, asynchronous=False)


def compared(metrics):
    return [{k: v for k, v in m.items() if not k.startswith(("time", *NOT_COMPARED))} for m in metrics]


def test_the_examples_gspo_has_the_bits_of_ours(tmp_path, folders):
    own = dict(loss=f"{EXAMPLE}:loss", advantage=f"{EXAMPLE}:advantages")
    kl = dict(kl_coefficient=0.05, kl_reference=str(folders[1]), entropy_coefficient=0.01, steps=3)
    ours, theirs = (
        reinforce(small_config(tmp_path / name, folders[0], **GSPO, **kl, **changes), EvenBytes())
        for name, changes in {"ours": {}, "own": own}.items()
    )
    assert compared(steps_of(ours)) == compared(steps_of(theirs))
    assert steps_of(ours)[-1]["policy/clip_fraction"] > 0, "what is compared are bounds that count"
    weights = [dict(load_model(run).named_parameters()) for run in (ours, theirs)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    for step in (1, 2, 3):
        of_runs = [[(r["token_ids"], r["advantage"]) for r in rollouts_of(run, step)] for run in (ours, theirs)]
        assert of_runs[0] == of_runs[1]


LOSS = """
import torch
import lockstep.rl as rl

def loss(inputs):
    ratio = (inputs.log_probs - inputs.old_log_probs).exp()
    return -inputs.advantages * ratio, {"surprise": inputs.average(-inputs.log_probs), "least_min": ratio.min()}

def advantages(inputs):
    return [[(reward - rewards.mean()) * torch.ones(n) for reward, n in zip(rewards, lengths)]
            for rewards, lengths in zip(inputs.rewards, inputs.lengths)]
"""


@pytest.fixture
def own(tmp_path):
    """A file with a loss and advantages, one per token."""
    file = tmp_path / "my_loss.py"
    file.write_text(LOSS)
    return file


def settings(file, **changes):
    return dict(loss=f"{file}:loss", advantage=f"{file}:advantages", validation_examples=0) | changes


def test_a_run_keeps_what_it_was_computed_with_and_is_replayed_from_it(tmp_path, folders, own, capsys):
    run = reinforce(small_config(tmp_path / "run", folders[0], checkpoint=EVERY, **settings(own)), EvenBytes())
    record = json.loads((run / "functions.json").read_text())
    assert {setting: (each["file"], each["function"]) for setting, each in record.items()} == {
        "loss": (str(own), "loss"),
        "advantage": (str(own), "advantages"),
    }
    assert (run / "loss.py").read_text() == (run / "advantage.py").read_text() == LOSS
    for metrics in steps_of(run):
        assert metrics["parity/tokens_different"] == 0 < metrics["policy/surprise"]
        assert metrics["policy/least_min"] == 1.0, "on policy"
    for rollout in rollouts_of(run, 2):
        assert len(rollout["token_advantages"]) == len(rollout["token_ids"])
    own.write_text(LOSS.replace("-inputs.advantages *", "-9 * inputs.advantages *"))
    assert replay(run, 2, EvenBytes()).equal, "the run's copy counts, not the file"
    more = small_config(run, folders[0], checkpoint=EVERY, resume=True, steps=3, **settings(own))
    with pytest.raises(UserError, match=r"my_loss.py: its loss is not the loss that the run in .* began with.*--loss "):
        reinforce(more, EvenBytes())
    more.loss, more.advantage = f"{run}/loss.py:loss", f"{run}/advantage.py:advantages"
    assert len(steps_of(reinforce(more, EvenBytes()))) == 3 and replay(run, 3, EvenBytes()).equal
    (run / "loss.py").write_text(own.read_text())
    with pytest.raises(UserError, match=r"loss.py: is not the copy of .* that the run kept"):
        replay(run, 3, EvenBytes())


def test_a_resumed_run_has_the_bits_of_one_that_was_never_interrupted(tmp_path, folders, own):
    changes = settings(own, checkpoint=EVERY)
    whole = reinforce(small_config(tmp_path / "whole", folders[0], steps=3, **changes), EvenBytes())
    parts = reinforce(small_config(tmp_path / "parts", folders[0], steps=2, **changes), EvenBytes())
    reinforce(small_config(parts, folders[0], steps=3, resume=True, **changes), EvenBytes())
    assert compared(steps_of(whole)) == compared(steps_of(parts))


WRONG = {
    "a scalar": ("loss", "return inputs.log_probs.sum(), {}", r"a tensor of shape \[\] for 10 tokens; return one loss"),
    "too few": ("loss", "return inputs.log_probs[1:], {}", r"a tensor of shape \[9\] for 10 tokens"),
    "no pair": ("loss", "return inputs.log_probs", "return a pair: one loss per token, and a dict"),
    "doubles": ("loss", "return inputs.log_probs.double(), {}", "losses in torch.float64 .* torch.float32 on cpu"),
    "no gradient": ("loss", "return inputs.log_probs.detach(), {}", "losses without a gradient; compute them from"),
    "gradient elsewhere": ("loss", "return inputs.entropies * 1, {}", "no gradient to inputs.log_probs"),
    "NaN": ("loss", "return inputs.log_probs / 0 * 0, {}", r"a loss that is not finite .*on policy"),
    "NaN on policy": (
        "loss",
        "d = inputs.log_probs - inputs.old_log_probs; return (d * d).sqrt(), {}",
        r"a gradient that is not finite for a toy batch on policy",
    ),
    "raises": (
        "loss",
        "return inputs.log_prob, {}",
        r"my_loss.py:3: loss raises AttributeError: .*log_prob.*; correct",
    ),
    "no reference": ("loss", "return inputs.log_probs - inputs.reference_log_probs, {}", "my_loss.py:3: .*NoneType"),
    "in place": ("loss", "inputs.advantages.clamp_(-1, 1); return inputs.log_probs * 1, {}", "changes its inputs"),
    "random": ("loss", "return inputs.log_probs * torch.rand(1), {}", "other numbers for the same inputs"),
    "metrics": ("loss", "return inputs.log_probs * 1, 3", "int 3 as metrics; return a dict"),
    "a metric": ("loss", "return inputs.log_probs * 1, {'x': inputs.weights}", "as the metric x; return one number"),
    "an infinite metric": ("loss", "return inputs.log_probs * 1, {'x': 1e999}", "the metric x that is not finite"),
    "a taken name": ("loss", "return inputs.log_probs * 1, {'kl': 0.0}", "a metric named 'kl'; give it a name"),
    "one group too few": ("advantages", "return inputs.rewards[1:]", "returns 2 groups for 3"),
    "one too few": (
        "advantages",
        "return [r[1:] for r in inputs.rewards]",
        "returns 3 advantages for group 0, which has 4 completions",
    ),
    "one token too many": (
        "advantages",
        "return [[[0.0] * (n + 1) for n in group] for group in inputs.lengths]",
        "returns 2 advantages for completion 0 of group 0, which has 1 tokens; give one per token",
    ),
    "of two kinds": (
        "advantages",
        "return [[0.0] + [[0.0] * n for n in group[1:]] for group in inputs.lengths]",
        "one advantage for some completions and one per token",
    ),
    "no spread": (
        "advantages",
        "return [(r - r.mean()) / r.std() for r in inputs.rewards]",
        "returns nan for completion 0 of group 1; give finite numbers, also for groups of equal rewards",
    ),
    "stacked": ("advantages", "return torch.stack(inputs.rewards)", "my_loss.py:3: advantages raises RuntimeError"),
    "nothing": ("advantages", "pass", "returns 1 group for 3"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named_before_anything_is_sampled(name, tmp_path, folders):
    function, body, said = WRONG[name]
    file = tmp_path / "my_loss.py"
    file.write_text(f"import torch\ndef {function}(inputs):\n    {body}\n")
    changes = {"loss" if function == "loss" else "advantage": f"{file}:{function}"}
    with pytest.raises(UserError, match=said):
        reinforce(small_config(tmp_path / "run", tmp_path / "no model is read", **changes), EvenBytes())


UNUSABLE = {
    "no.py:loss": "no.py: no such file; give the loss as FILE.py:NAME",
    "my_loss.py:los": r'has no function "los". Did you mean "loss"\? Found: loss, advantages, pair',
    "my_loss.py:rl": "rl is <module .*, not a function",
    "my_loss.py:pair": r"pair cannot be called \(missing a required argument: 'b'\); write `def pair\(inputs\)`",
    "broken.py:loss": r"broken.py:1: does not import \(SyntaxError",
    "my_loss.py": "it must be clip, clip_sequence, clip_weight, reinforce, or FILE.py:NAME",
    "clip_sequnce": r'it must be clip, clip_sequence.*of your own. Did you mean "clip_sequence"',
}


@pytest.mark.parametrize("setting", UNUSABLE)
def test_a_file_or_a_name_that_cannot_be_used_is_refused(setting, tmp_path, folders, own, monkeypatch):
    own.write_text(LOSS + "\ndef pair(a, b):\n    return a, b\n")
    (tmp_path / "broken.py").write_text("def loss(:\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=UNUSABLE[setting]):
        reinforce(small_config("run", folders[0], loss=setting), EvenBytes())


def test_settings_without_effect_beside_ones_own_functions_are_refused(tmp_path, folders, own):
    with pytest.raises(UserError, match=r"clip_high is 0.5, but only the function .*my_loss.py:loss decides"):
        reinforce(small_config(tmp_path / "run", folders[0], clip_high=0.5, **settings(own)), EvenBytes())
    with pytest.raises(UserError, match=r"normalize_advantages is False, but only the function"):
        reinforce(small_config(tmp_path / "run", folders[0], normalize_advantages=False, **settings(own)), EvenBytes())
    changes = dict(loss="clip_sequence", advantage=f"{own}:advantages")
    with pytest.raises(UserError, match="clip_sequence takes one advantage per completion, but .* returns one per"):
        reinforce(small_config(tmp_path / "run", folders[0], **changes), EvenBytes())


def test_a_loss_that_fails_in_the_first_step_names_its_line_and_leaves_no_run_behind(tmp_path, folders, own):
    own.write_text(LOSS.replace("    ratio =", "    assert len(inputs.weights) < 11, 'too many'\n    ratio ="))
    with pytest.raises(UserError, match=r"my_loss.py:6: loss raises AssertionError: too many; correct it"):
        reinforce(small_config(tmp_path / "run", folders[0], **settings(own)), EvenBytes())
    assert not (tmp_path / "run").exists()


def test_an_edit_of_the_same_length_within_the_same_second_counts(own):
    """Python would take the file for the one that it has compiled."""
    for factor in "23":
        own.write_text(f"def loss(inputs):\n    return {factor} * inputs.log_probs, {{}}\n")
        os.utime(own, (1e9, 1e9))
        inputs = rl.PolicyLossInputs(torch.ones(1), torch.ones(1), torch.ones(1), torch.ones(1))
        module = import_file(own, "loss", "FILE.py:NAME")
        assert module.loss(inputs)[0] == float(factor) and source_of(module) == own.read_bytes()
    assert not list(own.parent.glob("__pycache__")), "nothing is left beside the user's file, or in a run's folder"


def _on_ranks(model, output, file, changes):
    """Metrics of the run, or the error."""
    try:
        run = reinforce(small_config(output, model, **settings(file, **changes)), EvenBytes())
    except UserError as error:
        return str(error)
    return steps_of(run)


def _with_a_file_each(model, output, file, changes):
    copied = Path(f"{output}_{os.environ['RANK']}.py")
    copied.write_text(Path(file).read_text() + f"# {copied}\n")
    return _on_ranks(model, output, copied, changes)


@pytest.mark.slow
def test_ranks_share_one_file_and_have_the_bits_of_one_process(tmp_path, folders, own):
    train = TrainConfig(learning_rate=1e-2, schedule="constant", tokens_per_microbatch=64, deterministic_layout=True)
    model, changes = str(folders[0]), dict(train=train)
    alone = _on_ranks(model, str(tmp_path / "alone"), str(own), changes)
    names = ("loss", "grad_norm", "policy/surprise", "policy/least_min", "advantage/mean", "parity/tokens_different")
    for metrics in launch(2, _on_ranks, model, str(tmp_path / "shared"), str(own), changes):
        assert [[m[name] for name in names] for m in metrics] == [[m[name] for name in names] for m in alone]
    for error in launch(2, _with_a_file_each, model, str(tmp_path / "each"), str(own), changes):
        assert error.endswith("differs between the ranks' hosts; copy one version to all of them")


def test_the_penalty_and_the_teacher_reach_ones_own_advantages(tmp_path, folders, own):
    """With `kl_in = "reward"` the rewards are less the penalty, as those of `group` are; a teacher is scored."""
    own.write_text(
        "def advantages(inputs):\n"
        "    assert inputs.reference_log_probs and inputs.teacher_log_probs\n"
        "    return [rewards - rewards.mean() for rewards in inputs.rewards]\n"
    )
    changes = dict(kl_coefficient=0.5, kl_reference=str(folders[1]), kl_in="reward", validation_examples=0, steps=1)
    mine = dict(advantage=f"{own}:advantages", teacher=str(folders[1]))
    runs = [
        reinforce(small_config(tmp_path / name, folders[0], **changes, **more), EvenBytes())
        for name, more in {"own": mine, "ours": dict(normalize_advantages=False)}.items()
    ]
    advantages = [[r["advantage"] for r in rollouts_of(run, 1)] for run in runs]
    # The mean of float64 numbers below 10, exact in ours and not in torch's sum.
    assert advantages[0] == pytest.approx(advantages[1], abs=1e-14) and any(advantages[0])
