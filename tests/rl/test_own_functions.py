"""A loss and advantages from the user's files: the bits of ours, refused when wrong, and kept with the run."""

from pathlib import Path

import torch

from lockstep.checkpoint import load_model
from lockstep.config import CheckpointConfig
from lockstep.rl.reinforce import reinforce
from lockstep.rl.replay import NOT_COMPARED
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
