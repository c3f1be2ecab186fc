"""Finds the groups of samples that will complete last, as early as that is certain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from lockstep.generate.sampling_params import FinishReason


class Growing(Protocol):
    """A sample in progress."""

    @property
    def sampled(self) -> int:
        """Tokens so far."""

    @property
    def finish_reason(self) -> FinishReason | None:
        """None: not finished."""


def stragglers(groups: Mapping[int, Sequence[Growing]], first: int) -> list[int]:
    """The numbers of the groups that are certain not to be among the `first` to complete.

    A group is complete when all of its samples have ended; groups are ordered by the tokens of their longest sample,
    ties by the lower number. The order counts tokens, not seconds, so it depends only on the draws: the same groups are
    left out for any engine, speed, and number of calls of this function.
    """
    reached = {number: (max(each.sampled for each in samples), number) for number, samples in groups.items()}
    whole = [number for number, samples in groups.items() if all(each.finish_reason for each in samples)]
    if len(whole) < first:
        return []
    last = sorted(reached[number] for number in whole)[first - 1]
    return [number for number in groups if reached[number] > last]
