"""Log-probabilities with a gradient, for loops of one's own."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import lockstep
from lockstep.errors import UserError
from lockstep.model import preset, save_model
from lockstep.train import log_probs

ROWS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1], [8, 2, 8, 1, 8]]


@pytest.fixture(scope="module")
def model():
    return lockstep.build_model(preset("qwen3:micro", 64), dtype="float32", seed=1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_they_have_the_bits_of_score_and_of_the_engine(model, temperature):
    found = log_probs(model, ROWS, temperature)
    for each, scored, row in zip(found, lockstep.score(model, ROWS, temperature), ROWS):
        assert each.requires_grad and not scored.requires_grad and len(each) == len(row) - 1
        assert torch.equal(each.detach(), scored)
    params = lockstep.SamplingParams(max_tokens=9, seed=3, temperature=temperature, ignore_eos=True)
    (completion,) = lockstep.Engine(model).generate([ROWS[0]], params)[0]
    (found,) = log_probs(model, [ROWS[0] + completion.token_ids], temperature)
    assert torch.equal(found.detach()[len(ROWS[0]) - 1 :], torch.tensor(completion.logprobs))


def test_their_gradient_is_that_of_transformers(model, tmp_path):
    save_model(model, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    weights = [torch.linspace(-1, 1, len(row) - 1) for row in ROWS]
    model.zero_grad()
    sum((w * each).sum() for w, each in zip(weights, log_probs(model, ROWS))).backward()
    total = torch.zeros(())
    for row, w in zip(ROWS, weights):
        logits = theirs(torch.tensor([row])).logits[0, :-1]
        total = total + (w * logits.log_softmax(-1).gather(1, torch.tensor(row[1:])[:, None])[:, 0]).sum()
    total.backward()
    own = {name: p.grad for name, p in model.named_parameters()}
    compared = 0
    for name, parameter in theirs.named_parameters():
        if (mine := own.get(name.removeprefix("model."))) is not None:
            # Float32 sums in another order.
            torch.testing.assert_close(mine, parameter.grad, rtol=1e-3, atol=1e-5)
            compared += 1
    assert compared == len(own)


def test_sequences_that_cannot_be_scored_are_named(model):
    with pytest.raises(UserError, match="sequence 1"):
        log_probs(model, [[1, 2], [64]])
    with pytest.raises(UserError, match="temperature is -1.0; give a number of 0 or more"):
        log_probs(model, [[1, 2]], -1.0)
    assert log_probs(model, []) == lockstep.score(model, []) == []
