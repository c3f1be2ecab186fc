"""A session's loop: the bits of a run's step, and what it refuses."""

from pathlib import Path

import pytest
import torch

import lockstep
import lockstep.rl as rl
from lockstep.config import Algorithm, TrainConfig
from lockstep.data import ByteTokenizer
from lockstep.errors import UserError
from lockstep.model import load_model
from lockstep.python_file import import_file
from tests.rl.small_runs import EvenBytes, rollouts_of, small_config, steps_of

TRAIN = TrainConfig(learning_rate=1e-2, warmup_steps=0, schedule="constant", tokens_per_microbatch=64)
SMALL = dict(train=TRAIN, engine=lockstep.EngineConfig(max_sequences=16, cache_tokens=2048))
PROMPTS = ("stone:", "river:", "cloud:")
GSPO = import_file(Path(__file__).parents[2] / "examples/gspo_loss.py", "loss", "FILE.py:NAME").loss


def opened(folder, max_tokens=5, **changes):
    return rl.Session(folder, params=lockstep.SamplingParams(max_tokens=max_tokens), **SMALL | changes)


def centered(groups):
    rewards = [[EvenBytes().reward(rollout.example, rollout.completion) for rollout in group] for group in groups]
    return rl.group_advantages(torch.tensor(rewards, dtype=torch.float64))


@pytest.fixture
def session(folders):
    return opened(folders[0])


def test_a_loop_of_ones_own_learns_with_every_bit_compared(session):
    means = []
    for _ in range(16):
        groups = session.sample(PROMPTS, n=16)
        for group in groups:
            for rollout, scores in zip(group, session.score(group)):
                assert torch.equal(scores, torch.tensor(rollout.logprobs))
        metrics = session.update(groups, centered(groups))
        assert metrics["parity/tokens_different"] == 0 < metrics["parity/tokens_checked"]
        assert metrics["policy/ratio_max"] == metrics["policy/ratio_min"] == 1.0
        means += [sum(EvenBytes().reward(r.example, r.completion) for g in groups for r in g) / 48]
    assert sum(means[-3:]) > sum(means[:3]) + 0.3, means
    tensors = dict(session.engine.model.named_parameters())
    assert all(tensors[name] is parameter for name, parameter in session.trainer.model.named_parameters())


def test_an_update_has_the_bits_of_a_runs_step(tmp_path, folders, session):
    """On the run's own samples: the same loss, norm of the gradient, metrics and weights."""
    config = small_config(tmp_path / "run", folders[0], steps=1, validation_examples=0)
    run = lockstep.reinforce(config, EvenBytes())
    lines = rollouts_of(run, 1)
    rollouts = [
        rl.Rollout(
            rl.Example(line["prompt"]), line["group"], line["prompt_ids"], line["token_ids"], line["log_probs"],
            line["finish_reason"], line["completion"], 0,
        )
        for line in lines
    ]  # fmt: skip
    advantages = [line["advantage"] for line in lines]
    groups = [range(start, start + 4) for start in (0, 4, 8)]
    metrics = session.update([[rollouts[i] for i in g] for g in groups], [[advantages[i] for i in g] for g in groups])
    (of_run,) = steps_of(run)
    assert {name: value for name, value in metrics.items() if of_run[name] != value} == {}
    after = dict(load_model(run / "checkpoints/step_00000001").named_parameters())
    assert all(torch.equal(after[name], parameter) for name, parameter in session.model.named_parameters())


@pytest.mark.parametrize("loss", [None, GSPO], ids=["ours", "one's own"])
def test_completions_can_be_trained_on_again_with_any_loss_and_one_advantage_per_token(folders, loss):
    session = opened(folders[0])
    groups = session.sample(PROMPTS, n=4)
    advantages = [
        [[float(a)] * len(r.token_ids) for a, r in zip(of_group, group)]
        for of_group, group in zip(centered(groups), groups)
    ]
    first, second = (session.update(groups, advantages, "gspo", loss) for _ in range(2))
    assert first["parity/tokens_checked"] > 0 == second["parity/tokens_checked"], "those of older weights may differ"
    assert first["policy/ratio_max"] == 1.0 < second["policy/ratio_max"] and second["policy/clip_fraction"] > 0
    other = opened(folders[0])
    assert [[r.token_ids for r in g] for g in other.sample(PROMPTS, n=4)] == [[r.token_ids for r in g] for g in groups]
    assert [other.update(groups, advantages, "gspo", GSPO) for _ in range(2)] == [first, second]


def test_the_divergence_from_another_session_counts(folders, session):
    groups = session.sample(PROMPTS, n=4)
    algorithm = Algorithm(kl_coefficient=0.5)
    with pytest.raises(UserError, match="kl_coefficient needs rollout.scores.reference_logprobs"):
        session.update(groups, centered(groups), algorithm)
    reference = opened(folders[1])
    for group in groups:
        for rollout, scores in zip(group, reference.score(group)):
            rollout.scores.reference_logprobs = scores.tolist()
    assert session.update(groups, centered(groups), algorithm)["policy/kl"] > 0


def test_what_is_saved_is_a_model_that_continues_with_the_same_bits(tmp_path, session):
    groups = session.sample(PROMPTS, n=4)
    session.update(groups, centered(groups))
    session.save(tmp_path / "saved")
    again = opened(tmp_path / "saved")
    sequences = [[*b"some text"], [1, 2, 3]]
    assert all(map(torch.equal, again.score(sequences), session.score(sequences)))
    assert again.tokenizer.encode("stone") == session.tokenizer.encode("stone")


def test_what_does_not_fit_is_named(folders, session):
    groups = session.sample(PROMPTS, n=2)
    for advantages, said in (
        ([[1.0, -1.0]], "update gets 1 group for 3"),
        ([[1.0, -1.0]] * 2 + [[0.0]], "update gets 1 advantage for group 2, which has 2 completions"),
        (torch.full((3, 2), torch.nan), "update gets nan for completion 0 of group 0"),
    ):
        with pytest.raises(UserError, match=said):
            session.update(groups, advantages)
    with pytest.raises(UserError, match='no algorithm "daop". Did you mean "dapo"'):
        session.update(groups, torch.zeros(3, 2), "daop")
    with pytest.raises(UserError, match=r"<lambda> returns a tensor of shape \[\] for"):
        session.update(groups, torch.zeros(3, 2), loss=lambda inputs: (inputs.log_probs.sum(), {}))
    with pytest.raises(UserError, match="temperature is 0.5, but this session trains at 1.0"):
        session.sample(PROMPTS, temperature=0.5)
    with pytest.raises(UserError, match="temperature is 0.0; give 0.01 or more"):
        rl.Session(folders[0], params=lockstep.SamplingParams(temperature=0.0))
    with pytest.raises(UserError, match='train.schedule is "cosine", which needs the number of updates'):
        opened(folders[0], train=TrainConfig())
    model = load_model(folders[0])
    with pytest.raises(UserError, match=r"no tokenizer; give the session both: Session\(model, tokenizer\)"):
        opened(model)
    with pytest.raises(UserError, match="all weights of the model are frozen"):
        opened(model.requires_grad_(False), tokenizer=ByteTokenizer())
