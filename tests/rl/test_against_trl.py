"""A GRPO step's loss and gradient equal those of TRL's own trainer, which runs here, on the same batch."""

import math

import pytest
import torch

from lockstep import build_model
from lockstep.config import RLConfig, TrainConfig
from lockstep.model import ModelConfig, hugging_face_name
from lockstep.rl import Example
from lockstep.rl.rollouts.packing import packing_metrics, packing_of
from lockstep.rl.rollouts.records import Conversation, Rollout, Scores
from tests.rl import trl_step as trl
from tests.rl.losses import batches_of, loss_of


@pytest.fixture(scope="module")
def theirs():
    return trl.losses_and_gradients()


def _model():
    shape = trl.SHAPE
    config = ModelConfig(
        family="qwen3", vocab_size=shape["vocab_size"], dim=shape["dim"], num_layers=shape["layers"],
        num_heads=shape["heads"], num_kv_heads=shape["kv_heads"], head_dim=shape["head_dim"],
        intermediate_size=shape["intermediate"], tie_embeddings=False, qk_norm=True, max_positions=64,
    )  # fmt: skip
    model = build_model(config, dtype="float32")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(trl.weight(hugging_face_name(name), parameter.shape))
    return model


@pytest.mark.parametrize("tokens_per_microbatch", [1000, 5])
@pytest.mark.parametrize(("kind", "masked"), trl.CASES)
def test_loss_and_gradient_of_a_step_are_those_of_trl(theirs, kind, masked, tokens_per_microbatch):
    config = RLConfig(
        model="none", loss_average=trl.AVERAGES[kind], **trl.SETTINGS,
        mask_truncated_completions=masked, max_new_tokens=trl.BUDGET,
        train=TrainConfig(tokens_per_microbatch=tokens_per_microbatch),
    )  # fmt: skip
    rollouts = []
    for row, (prompt, tokens, advantage) in enumerate(zip(trl.PROMPTS, trl.COMPLETIONS, trl.ADVANTAGES)):
        old = [trl.old_log_prob(row, position) for position in range(len(tokens))]
        reason = "stop" if tokens[-1] == 0 else "length"
        rollout = Rollout(
            Example("p"), row // 2, prompt, tokens, old, reason, "", 0, scores=Scores(advantage=advantage)
        )
        rollout.scores.reference_logprobs = [trl.reference_log_prob(row, position) for position in range(len(tokens))]
        rollouts.append(rollout)
    model, step = _model(), loss_of(config, compare=False)
    loss = 0.0
    batches = batches_of(rollouts, config)
    for batch in batches:
        part = step(model, batch)
        part.backward()
        loss += float(part.detach())
    assert len(batches) == (1 if tokens_per_microbatch == 1000 else 3)
    assert 0.1 < step.metrics()["policy/clip_fraction"] < 0.9, "some tokens are clipped, others not"
    assert packing_metrics(batches, packing_of(config)).get("rollout/masked_tokens") == (5 if masked else None)
    expected = theirs[kind, masked]
    # TRL's model is in float64, ours in float32: measured are 5.4e-7 of the loss (TRL's own float32: 1.1e-6), and
    # of a parameter's gradient 3e-6 of its norm and 2.3e-5 along a direction, where terms cancel.
    assert loss == pytest.approx(expected["loss"], rel=1e-6)
    ours = {hugging_face_name(name): parameter.grad for name, parameter in model.named_parameters()}
    assert ours.keys() == expected["gradients"].keys()
    for name, gradient in ours.items():
        (norm, along), (their_norm, their_along) = trl.in_figures(name, gradient), expected["gradients"][name]
        assert norm == pytest.approx(their_norm, rel=1e-5) and norm > 0, name
        assert along == pytest.approx(their_along, abs=5e-5 * their_norm), name


def test_a_step_of_truncated_completions_alone_moves_nothing():
    for average in ("token", "sequence", "budget"):
        config = RLConfig(model="none", loss_average=average, mask_truncated_completions=True)
        rollout = Rollout(Example("p"), 0, [1, 2], [5, 6], [-2.0, -2.0], "length", "", 0, scores=Scores(advantage=1.0))
        (batch,) = batches_of([rollout], config)
        model, step = _model(), loss_of(config, compare=False)
        step(model, batch).backward()
        assert all(not parameter.grad.any() for parameter in model.parameters())
        assert all(math.isfinite(value) for value in step.metrics().values())


def test_metrics_of_a_step_are_those_of_what_is_not_masked():
    config = RLConfig(model="none", loss_average="sequence", mask_truncated_completions=True)

    def metrics(*reasons):
        rollouts = [
            Rollout(Example("p"), 0, [1, 2], [5 + n, 6], [-2.0, -2.0 - n], reason, "", 0, scores=Scores(advantage=1.0))
            for n, reason in enumerate(reasons)
        ]
        step = loss_of(config, compare=False)
        for batch in batches_of(rollouts, config):
            step(_model(), batch)
        return step.metrics()

    alone, beside = metrics("stop"), metrics("stop", "length")
    means = [name for name in alone if not name.endswith(("_min", "_max"))]  # which look at every token
    assert alone["policy/entropy"] > 0
    assert {name: beside[name] for name in means} == pytest.approx({name: alone[name] for name in means})


def test_a_conversation_is_truncated_if_its_last_reply_is():
    def rows(episode, *reasons):
        held = Conversation([], None, False, len(reasons), 0, {})
        return [
            Rollout(
                Example("p"), 0, [1], [5, 6], [-2.0, -2.0], reason, "", 0, episode=episode, conversation=held,
                scores=Scores(advantage=1.0),
            )
            for reason in reasons
        ]  # fmt: skip

    config = RLConfig(model="none", loss_average="token", mask_truncated_completions=True)
    rollouts = [*rows(0, "length", "stop"), *rows(1, "stop", "length")]
    weights = {id(r): batch.weights for batch in batches_of(rollouts, config, budget=1) for r in batch.rollouts}
    assert [weights[id(r)].tolist() for r in rollouts] == [[0.25, 0.25], [0.25, 0.25], [0.0, 0.0], [0.0, 0.0]]
