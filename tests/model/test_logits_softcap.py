"""A model whose logits are capped: the same cap wherever they are computed."""

from dataclasses import replace

import pytest
import torch

from lockstep import Engine, EngineConfig, SamplingParams, build_model, ops, score
from lockstep.errors import UserError
from lockstep.model import preset
from lockstep.model.known_operators import refuse_unknown_operators
from lockstep.rl.scoring.explain import first_difference
from lockstep.rl.scoring.parity_check import check_parity
from lockstep.train import pack
from lockstep.train.packing import target_log_prob_sum, target_log_probs

CAP = 15.0


def capped_model(dtype: str, cap: float = CAP):
    shape = replace(preset("qwen3:micro", 258), num_layers=2, tie_embeddings=False, logits_softcap=cap)
    model = build_model(shape, dtype=dtype, seed=0)
    with torch.no_grad():
        model.lm_head.weight.mul_(60)  # logits beyond the cap
    return model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trainer_and_generator_agree_under_a_mixed_load(dtype):
    parity, load = check_parity(capped_model(dtype), tokens=1500)
    assert parity.tokens_different == 0 and parity.tokens_checked >= 1500
    assert load["preemptions"] > 0 and load["reused prompt tokens"] > 0


def test_samples_scores_and_losses_are_those_of_capped_logits():
    model, tokens = capped_model("float32"), [5, 7, 250, 7, 11, 3]
    with torch.no_grad():
        hidden = model(torch.tensor(tokens), torch.arange(6), ops.PackedAttention([6]))
        free = (hidden.double() @ model.lm_head.weight.double().T)[:-1]
    expected = torch.log_softmax(CAP * torch.tanh(free / CAP), -1)
    expected = expected.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    assert free.abs().max() > 2 * CAP and (free.log_softmax(-1) - expected[:, None]).abs().max() > 1
    row = pack([tokens])
    found = target_log_probs(model, row)[0]
    # The head sums in float32, the definition in float64; the loss adds the same numbers in another order.
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(target_log_prob_sum(model, row, 1.0), found.sum(), rtol=1e-6, atol=0)
    assert torch.equal(score(model, [tokens])[0], found)
    params = SamplingParams(max_tokens=9, seed=1, ignore_eos=True)
    ((completion,),) = Engine(model, EngineConfig(cache_tokens=512)).generate([tokens], params)
    whole = score(model, [[*tokens, *completion.token_ids]])[0]
    assert torch.equal(whole[5:], torch.tensor(completion.logprobs))
    refuse_unknown_operators(model)


def test_a_cap_that_differs_is_named(monkeypatch):
    exact = ops.softcap

    def different(logits, cap):
        return exact(logits, cap + (len(logits) == 1))

    monkeypatch.setattr(ops, "softcap", different)
    difference = first_difference(capped_model("float32"), [5, 7, 250, 7, 11, 3], 4)
    assert difference is not None and difference.operator == "lm_head, softcap"


@pytest.mark.parametrize("cap", [-1.0, float("inf"), float("nan")])
def test_a_cap_that_is_none_is_refused(cap):
    with pytest.raises(UserError, match=r"logits_softcap is .*; it must be above 0, or 0 for no cap"):
        replace(preset("qwen3:micro"), logits_softcap=cap)
