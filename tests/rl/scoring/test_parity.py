"""What counts as different between generator and trainer."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from lockstep import Engine, SamplingParams, build_model
from lockstep.config import RLConfig
from lockstep.errors import UserError
from lockstep.model import preset
from lockstep.rl import Example
from lockstep.rl.rollouts.records import Rollout, Scores
from lockstep.rl.scoring import parity_check
from lockstep.rl.scoring.parity import Parity, ParityError
from lockstep.rl.scoring.parity_check import check_parity
from lockstep.train import score
from tests.rl.losses import batches_of, loss_of

SHORT = replace(preset("qwen3:micro"), max_positions=64)
"""Its context limits the load."""


def _compared(generator, trainer):
    parity = Parity()
    parity.compare(torch.tensor(generator), torch.tensor(trainer))
    return parity


def test_what_is_not_finite_differs_by_infinity_though_both_sides_have_it():
    nan, inf = math.nan, math.inf
    assert _compared([nan, -1.0], [nan, -1.0]) == Parity(2, 1, inf)
    assert _compared([-inf, -1.0], [-inf, -1.0]) == Parity(2, 1, inf)
    assert _compared([-2.0, -1.0], [-2.0, nan]) == Parity(2, 1, inf)
    assert _compared([-2.0, -1.0], [-inf, -1.0]) == Parity(2, 1, inf)

    parity = _compared([math.nan], [math.nan])
    parity.compare(torch.tensor([-1.0]), torch.tensor([-1.5]))
    assert parity == Parity(2, 2, math.inf), "a later difference does not hide it"
    assert _compared([-1.0, -2.0], [-1.0, -2.5]) == Parity(2, 1, 0.5)


def test_a_model_of_nan_does_not_pass():
    model = build_model(preset("qwen3:micro"), dtype="float32")
    with torch.no_grad():
        model.norm.weight.fill_(math.nan)
    with pytest.raises(UserError, match="prompt 0: its logits are not finite"):
        check_parity(model, tokens=64)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_heads_that_are_padded_agree(dtype):
    model = build_model(replace(SHORT, head_dim=20), dtype=dtype)
    parity, load = check_parity(model, tokens=64)
    assert (parity.tokens_checked >= 64, parity.tokens_different) == (True, 0)
    assert load["preemptions"] > 0 and load["reused prompt tokens"] > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lone_prompts_agree(dtype):
    """A library's product of one row has other bits than one of several."""
    model = build_model(SHORT, dtype=dtype, seed=1)
    for length in (1, 5, 17):
        prompt, params = list(range(3, 3 + length)), SamplingParams(max_tokens=12, temperature=0.85, seed=length)
        ((completion,),) = Engine(model).generate([prompt], params)
        trainer = score(model, [prompt + completion.token_ids], 0.85)[0][length - 1 :]
        assert torch.equal(torch.tensor(completion.logprobs), trainer)


def _flipped_bit(model, sequences, temperature):
    """The lowest bit of one log-probability of the last sequence's last token."""
    scores = score(model, sequences, temperature)
    scores[-1][-1:].view(torch.int32).bitwise_xor_(1)
    return scores


def _stale_weights(model, sequences, temperature):
    """The trainer's weights are ahead of the generator's in the last bit of one element."""
    prefetcher = copy.deepcopy(model)
    with torch.no_grad():
        prefetcher.norm.weight[:1].view(torch.int16 if model.dtype == torch.bfloat16 else torch.int32).bitwise_xor_(1)
    return score(prefetcher, sequences, temperature)


@pytest.mark.parametrize("fault", [_flipped_bit, pytest.param(_stale_weights, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_planted_fault_is_found(monkeypatch, dtype, fault):
    # A last bit shows in few of the log-probabilities, so that it takes many.
    model = build_model(SHORT if fault is _flipped_bit else preset("qwen3:micro"), dtype=dtype)
    monkeypatch.setattr(parity_check, "score", fault)
    parity, _ = check_parity(model, tokens=64)
    assert parity.tokens_different > 0 and parity.max_delta > 0


def test_of_steps_sampled_ahead_tokens_of_the_current_weights_are_compared_and_all_are_trained_on_as_sampled():
    model = build_model(preset("qwen3:micro"), dtype="float32", seed=1)
    prompt, tokens, versions = [5, 6, 7], [8, 9, 10, 11], [3, 4, 5, 5]
    (scores,) = score(model, [prompt + tokens], 1.0)
    # What the weights of versions 3 and 4 said.
    logprobs = [-0.5, -0.25, *scores[len(prompt) + 1 :].tolist()]

    def checked(logprobs):
        scores = Scores(advantage=1.0, reward=1.0)
        rollout = Rollout(Example("p"), 0, prompt, tokens, logprobs, "stop", "", 3, versions=versions, scores=scores)
        config = RLConfig(dtype="float32")
        (batch,) = batches_of([rollout], config, version=5)
        loss = loss_of(config, compare=True)
        loss(model, batch)
        assert batch.old_log_probs.tolist() == torch.tensor(logprobs).tolist()
        loss.parity.require_equal(6, config.on_parity_error, model)
        return loss.parity, loss.ratio_max

    parity, ratio = checked(logprobs)
    assert parity == Parity(2, 0, 0.0)
    assert ratio == pytest.approx(max(1.0, *torch.tensor([scores[2] + 0.5, scores[3] + 0.25]).exp().tolist()))
    assert checked([-0.75, *logprobs[1:]])[0] == Parity(2, 0, 0.0)
    planted = torch.tensor(logprobs)
    planted[-1:].view(torch.int32).bitwise_xor_(1)
    with pytest.raises(ParityError, match="step 6: 1 of 2 log-probabilities differ"):
        checked(planted.tolist())
