"""Estimates over held-out prompts, and the test that compares two models on the same prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts."""

    mean: float
    standard_error: float | None
    """Of the mean, over prompts; None with fewer than two."""

    def text(self) -> str:
        """`0.443 ± 0.021`."""
        return f"{self.mean:.3f}" + (f" ± {self.standard_error:.3f}" if self.standard_error is not None else "")


def estimate(values: Sequence[Sequence[float]]) -> Estimate:
    """The mean over prompts of each prompt's mean; `values[i]` are the values of prompt i's samples, at least one.

    The standard error is clustered by prompt (arXiv 2411.00640, section 2.2): samples of one prompt are not
    independent, so the prompts' means are the observations.
    """
    means = [math.fsum(of_prompt) / len(of_prompt) for of_prompt in values]
    count = len(means)
    mean = math.fsum(means) / count
    if count < 2:
        return Estimate(mean, None)
    variance = math.fsum((value - mean) ** 2 for value in means) / (count - 1)
    return Estimate(mean, math.sqrt(variance / count))


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The probability that at least one of `k` samples, drawn without replacement, is right.

    Given `samples` completions of which `right` are right, an unbiased estimate of pass@k (arXiv 2107.03374).
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, not {samples}")
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def randomization_test(differences: Sequence[int]) -> float:
    """The two-sided p-value of the exact paired randomization test (Fisher; Noreen 1989).

    differences: for each prompt, how many more samples one model got right than the other, out of equally many. If the
    models were equal, each difference would be as likely with the opposite sign; the p-value is the fraction of all
    sign assignments whose sum is at least as far from 0. With one sample per prompt this is McNemar's exact test.
    """
    sizes = [abs(difference) for difference in differences if difference]
    reach = sum(sizes)
    # probability[s + reach]: of the sum s, over the differences so far.
    probability = np.zeros(2 * reach + 1)
    probability[reach] = 1.0
    for size in sizes:
        probability = (np.roll(probability, size) + np.roll(probability, -size)) / 2
    sums = np.abs(np.arange(-reach, reach + 1))
    return min(1.0, float(probability[sums >= abs(sum(differences))].sum()))


EXACT, DRAWS, AT_ONCE = 16, 20_000, 200


def randomization_test_of_means(differences: Sequence[float]) -> float:
    """As `randomization_test`, for real-valued differences.

    Over all sign assignments for up to 16 prompts that differ; beyond that, over 20,000 random ones, always the same,
    plus the observed one, so that it is never 0 (Phipson and Smyth 2010).
    """
    sizes = np.array([abs(difference) for difference in differences if difference])
    # Sums of one assignment in two orders can differ in the last bits of the largest terms.
    reach = abs(math.fsum(differences)) - 1e-12 * float(sizes.sum())
    if len(sizes) <= EXACT:
        flipped = np.arange(1 << len(sizes))[:, None] >> np.arange(len(sizes)) & 1
        return float((np.abs((1 - 2 * flipped) @ sizes) >= reach).mean())
    draw = np.random.Generator(np.random.Philox(key=0))
    signs = (1 - 2 * draw.integers(0, 2, (AT_ONCE, len(sizes))) for _ in range(DRAWS // AT_ONCE))
    far = sum(int((np.abs(some @ sizes) >= reach).sum()) for some in signs)
    return (far + 1) / (DRAWS + 1)
