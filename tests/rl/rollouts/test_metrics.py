"""What a step's metrics say of its rollouts."""

import hypothesis.strategies as st
from hypothesis import given

import lockstep.rl as rl
from lockstep.rl.rollouts.metrics import distinct_share, pairwise_overlap, rollout_metrics
from lockstep.rl.rollouts.records import Scores


def _rollout(group, tokens, reward=0.0, **changes):
    return rl.Rollout(rl.Example(f"p{group}"), group, [1], tokens, [-0.5] * len(tokens), "stop", "", 0,
                      scores=Scores(changes.pop("rewards", {"reward": reward}), reward), **changes)  # fmt: skip


def test_percentiles_are_values_that_were_there():
    rollouts = [_rollout(n // 5, [7] * (n + 1), reward=float(n)) for n in range(10)]
    metrics = rollout_metrics(rollouts)
    assert [metrics[f"reward/total_p{p}"] for p in (10, 50, 90)] == [0.0, 4.0, 8.0]
    assert [metrics[f"rollout/tokens_p{p}"] for p in (10, 50, 90)] == [1.0, 5.0, 9.0]
    one = rollout_metrics(rollouts[3:4])
    assert {one[f"reward/total_p{p}"] for p in (10, 50, 90)} == {3.0}


def test_diversity_is_the_mean_over_groups_of_what_their_completions_share():
    rollouts = [_rollout(0, [1, 2, 3]), _rollout(0, [1, 2, 3]), _rollout(1, [1, 2, 3]), _rollout(1, [1, 2, 4])]
    metrics = rollout_metrics(rollouts)
    assert metrics["diversity/distinct"] == (0.5 + 1.0) / 2
    # Of the second group's four different bigrams, (start, 1), (1, 2), (2, 3) and (2, 4), two are in both.
    assert metrics["diversity/overlap"] == (1.0 + 2 / 4) / 2


@given(st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=40))
def test_overlap_is_a_share_which_is_1_for_equal_completions_and_0_for_those_without_a_common_pair(group):
    assert 0 <= pairwise_overlap(group) <= 1
    assert 0 < distinct_share(group) <= 1
    assert pairwise_overlap([[1, 2], [1, 2], [1, 2]]) == pairwise_overlap([[], []]) == 1
    assert pairwise_overlap([[1, 2], [2, 1]]) == pairwise_overlap([[1]]) == 0
    apart = [[10 * n + token for token in tokens or [9]] for n, tokens in enumerate(group)]
    assert pairwise_overlap(apart) == 0


def test_a_rewards_name_cannot_pass_for_another_metric():
    rewards = {"a/b": 1.0, "failed/raised": 0.5, "line\nbreak": 0.25, "\ud800": 0.0, "100%": 2.0}
    metrics = rollout_metrics([_rollout(0, [1], rewards=rewards)])
    assert metrics["reward/a%2fb/mean"] == 1.0 and metrics["reward/100%25/mean"] == 2.0
    assert metrics["reward/failed%2fraised/mean"] == 0.5 and not any(n.startswith("reward/failed/") for n in metrics)
    assert metrics["reward/line%0abreak/mean"] == 0.25 and metrics["reward/%d800/mean"] == 0.0
