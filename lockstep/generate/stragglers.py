"""Which of several groups of samples are the last to be whole, as early as that can be known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from lockstep.generate.sampling_params import FinishReason


class Growing(Protocol):
    """A sample on its way."""

    @property
    def sampled(self) -> int:
        """Tokens so far."""

    @property
    def finish_reason(self) -> FinishReason | None:
        """None: it goes on."""


def stragglers(groups: Mapping[int, Sequence[Growing]], first: int) -> list[int]:
    """The numbers of the groups that are not among the `first` to be whole, as far as the samples tell by now.

    A group is whole when all of its samples have ended, and the sooner the fewer tokens its longest sample has; of
    equal ones the lower number is first. Counted in tokens and not in seconds the order follows from the draws alone:
    whoever samples, how fast, and how often this is asked meanwhile, the same groups are left.
    """
    reached = {number: (max(each.sampled for each in samples), number) for number, samples in groups.items()}
    whole = [number for number, samples in groups.items() if all(each.finish_reason for each in samples)]
    if len(whole) < first:
        return []
    last = sorted(reached[number] for number in whole)[first - 1]
    return [number for number in groups if reached[number] > last]
