"""What fits into the context and the cache, to the token; log-probabilities under a cut; validation by conversation."""

import pytest
import torch

import lockstep
import lockstep.rl as rl
from lockstep import ops
from lockstep.config import EngineConfig
from lockstep.rl.conversations.play import unfit
from lockstep.rl.rollouts.metrics import validation_metrics
from tests.rl.conversations.test_play import Talk, talk
from tests.rl.conversations.test_rows import as_rows, completions


def test_a_prompt_fits_up_to_the_last_token_of_the_context_and_of_the_cache(engine_of):
    engine = engine_of("llama3")  # of 512 positions
    assert unfit([1] * 500, engine, 12) == ""
    assert "prompt of 501 tokens and max_new_tokens 12 exceed the context of 512" in unfit([1] * 501, engine, 12)
    assert "prompt is empty" in unfit([], engine, 12)
    small = lockstep.Engine(engine.model, EngineConfig(max_tokens_per_step=64, cache_tokens=64), engine.tokenizer)
    assert small.allocator.num_pages * ops.PAGE == 64
    assert unfit([1] * 52, small, 12) == ""
    assert "do not fit in the cache of 64 tokens" in unfit([1] * 53, small, 12)


def test_every_sampled_token_has_its_log_probability_under_the_cut_too(engine_of, renderings):
    """log p of the sampled token among the five likeliest: its own less that of all five."""
    engine = engine_of("llama3")
    assert not any(r.truncated_logprobs for r in talk(Talk(), engine, renderings["llama3"], temperature=0.7))
    rollouts = talk(Talk(), engine, renderings["llama3"], temperature=0.7, top_k=5)
    assert max(r.sampled.count(False) for r in rollouts) > 0, "rows of several turns"
    for rollout in rollouts:
        assert len(rollout.truncated_logprobs) == len(rollout.logprobs) == rollout.num_sampled
        tokens = torch.tensor(rollout.prompt_ids + rollout.token_ids)
        with torch.no_grad():
            hidden = engine.model(tokens, torch.arange(len(tokens)), ops.PackedAttention([len(tokens)]))
            logits = hidden.double() @ engine.model.head_weight.double().T / 0.7
        before = torch.tensor(rollout.targets()) - 1
        whole = logits[before].log_softmax(-1)
        own = whole.gather(1, tokens[before + 1][:, None])[:, 0]
        cut = own - whole.topk(5).values.logsumexp(-1)
        # Logits of up to 30 in float32, rounded to 2e-6, twice: 2.7e-6 measured.
        torch.testing.assert_close(torch.tensor(rollout.logprobs).double(), own, rtol=0, atol=1e-5)
        torch.testing.assert_close(torch.tensor(rollout.truncated_logprobs).double(), cut, rtol=0, atol=1e-5)
        assert (cut > own).all()


class Solved(rl.ConversationEnvironment):
    """An odd reward is right."""

    def knows_correct(self, rewards):
        return True

    def is_correct(self, rewards):
        return rewards["reward"] % 2 == 1


@pytest.mark.parametrize("failed", [0, 1])
def test_a_validation_counts_a_conversation_once_however_many_rows_it_has(failed):
    whole = completions()  # of the rewards 0, 1, 4, 9, 16 and 25
    rows = as_rows(whole)
    # A third row of the last one, and none but one of the first.
    rows = [*rows[1:], rows[-1]]
    for rollout in [*rows[:failed], *whole[:failed]]:
        rollout.scores.failure, rollout.scores.counts = "raised", False
    metrics = validation_metrics(rows, Solved())
    assert metrics == validation_metrics(whole, Solved())
    of_a_prompt: dict = {}
    for rollout in whole[failed:]:
        of_a_prompt.setdefault(rollout.group, []).append(rollout.scores.reward)
    means = [sum(rewards) / len(rewards) for rewards in of_a_prompt.values()]
    shares = [sum(reward % 2 for reward in rewards) / len(rewards) for rewards in of_a_prompt.values()]
    # Sums in another order: the last bits may differ.
    assert metrics["validation/reward"] == pytest.approx(sum(means) / len(means), rel=1e-14)
    assert metrics["validation/accuracy"] == pytest.approx(sum(shares) / len(shares), rel=1e-14)
