"""What group-relative advantages do not depend on."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.rl import group_advantages
from lockstep.rl.grading import LARGEST

# Quarters up to 4 in groups of 4: sums and means are exact in float32, so equality below is of bits.
REWARDS = st.lists(st.lists(st.integers(-16, 16).map(lambda n: n / 4), min_size=4, max_size=4), min_size=1, max_size=5)


@settings(max_examples=20)
@given(REWARDS, st.integers(-8, 8), st.booleans())
def test_a_reward_added_to_a_whole_group_changes_nothing(rewards, shift, normalize):
    rewards = torch.tensor(rewards)
    assert torch.equal(group_advantages(rewards + shift, normalize), group_advantages(rewards, normalize))


@settings(max_examples=20)
@given(REWARDS, st.booleans())
def test_a_group_does_not_see_the_others(rewards, normalize):
    together = group_advantages(torch.tensor(rewards), normalize)
    alone = torch.cat([group_advantages(torch.tensor([group]), normalize) for group in rewards])
    assert torch.equal(together, alone)


@settings(max_examples=20)
@given(st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=20), st.booleans(), st.randoms())
def test_a_reward_has_its_advantage_wherever_it_stands_in_the_group(rewards, normalize, random):
    order = random.sample(range(len(rewards)), len(rewards))
    expected = group_advantages(torch.tensor([rewards]), normalize)[:, order]
    assert torch.equal(group_advantages(torch.tensor([rewards])[:, order], normalize), expected)


@settings(max_examples=20)
@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 9), st.booleans())
def test_equal_rewards_are_exactly_zero_even_where_their_mean_is_rounded(reward, samples, normalize):
    assert not group_advantages(torch.full((2, samples), reward), normalize).any()


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("others", [[1.0, 1.0, 1.0], [-LARGEST, 0.0, 0.0], [LARGEST, LARGEST, -LARGEST]])
def test_the_largest_rewards_that_are_taken_have_finite_advantages_and_squares(normalize, others):
    advantages = group_advantages(torch.tensor([[LARGEST, *others]]), normalize)
    assert advantages.square().sum().isfinite() and advantages.any()
