"""Estimates over prompts and the paired test, against enumeration and textbook forms."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.rl.rollouts.estimates import estimate, pass_at_k, randomization_test, randomization_test_of_means


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_draws_of_k_samples_that_hold_a_right_one(drawn):
    samples, right, k = drawn
    draws = list(itertools.combinations([True] * right + [False] * (samples - right), k))
    assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


def test_pass_at_more_than_there_are_samples_is_refused():
    with pytest.raises(ValueError, match="pass@3 needs at least 3 samples, not 2"):
        pass_at_k(2, 1, 3)


def test_the_standard_error_is_clustered_by_prompt_and_not_made_smaller_by_asking_again():
    once = estimate([[1.0], [0.0], [1.0], [0.0]])
    assert once.mean == 0.5 and once.standard_error == pytest.approx(math.sqrt(1 / 3 / 4))
    assert estimate([[1.0] * 50, [0.0] * 50, [1.0] * 50, [0.0] * 50]) == once
    assert estimate([[1.0, 0.0]]).standard_error is None


@given(st.lists(st.integers(-4, 4), max_size=9))
def test_the_p_value_is_the_share_of_all_assignments_of_signs_that_are_as_far_from_zero(differences):
    sums = [
        sum(s * d for s, d in zip(signs, differences)) for signs in itertools.product((1, -1), repeat=len(differences))
    ]
    share = sum(abs(s) >= abs(sum(differences)) for s in sums) / len(sums)
    assert randomization_test(differences) == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (5, 1), (12, 30), (400, 350)])
def test_with_one_sample_per_prompt_it_is_mcnemars_exact_test(better, worse):
    discordant = better + worse
    tail = sum(math.comb(discordant, i) for i in range(min(better, worse) + 1)) / 2**discordant
    expected = min(1.0, 2 * tail)
    assert randomization_test([1] * better + [-1] * worse + [0] * 7) == pytest.approx(expected, rel=1e-9)


@given(st.lists(st.integers(-4, 4), max_size=9))
def test_means_are_compared_as_whole_numbers_are(differences):
    of_means = randomization_test_of_means([difference / 7 for difference in differences])
    assert of_means == pytest.approx(randomization_test(differences), abs=1e-12)


@pytest.mark.parametrize("times", [1, 10])  # all assignments, and drawn ones
@pytest.mark.parametrize("whole", [[4, -6, 3, 0, -1, 0], [1, 2, -3]])
def test_differences_that_cancel_show_nothing_whatever_their_scale(whole, times):
    assert randomization_test_of_means([each / 10 for each in whole] * times) == 1.0
    assert randomization_test_of_means(whole * times) == 1.0


def test_few_prompts_show_little_and_many_are_drawn_from():
    assert randomization_test_of_means([0.25, 0.25]) == 0.5
    differences = [1, 2, -1, 3, 1, 1, -2, 2, 1, 3, -1, 2, 1, 1, -3, 2, 1, 2, 0, 1]
    exact, drawn = randomization_test(differences), randomization_test_of_means(differences)
    assert 0 < drawn != exact and abs(drawn - exact) < 4 * math.sqrt(exact * (1 - exact) / 20_000)
    assert randomization_test_of_means([1.0] * 100) == 1 / 20_001
