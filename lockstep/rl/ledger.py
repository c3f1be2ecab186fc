"""What became of every prompt of a step: its group was trained on, or dropped for a cause, and nothing was lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

FAILED_REWARDS = "failed_rewards"
"""So many of a group's rewards failed that fewer than two are left to compare."""


class LedgerError(Exception):
    """Groups were lost or counted twice: a fault of the loop, not of its input."""


@dataclass
class Ledger:
    """The groups of one step. Who drops some says so, with its cause."""

    drawn: int
    """Prompts that were drawn, each of which became a group."""
    dropped: Counter[str] = field(default_factory=Counter)
    trained: int = 0

    def drop(self, cause: str, groups: int = 1) -> None:
        self.dropped[cause] += groups

    def train(self, groups: Iterable[int]) -> None:
        """Counts the groups in what the trainer is given: the group of each rollout, in any order."""
        self.trained += len(set(groups))

    def metrics(self) -> dict[str, float]:
        """The counts by name. Raises LedgerError unless drawn = trained + dropped, to the last group."""
        dropped = sum(self.dropped.values())
        if self.drawn != self.trained + dropped:
            causes = ", ".join(f"{count} {cause}" for cause, count in sorted(self.dropped.items())) or "none"
            raise LedgerError(
                f"{self.drawn} groups were drawn, but {self.trained} trained and {dropped} dropped ({causes}); "
                "this is a bug of Lockstep"
            )
        return {
            "groups/drawn": self.drawn,
            "groups/trained": self.trained,
            **{f"groups/dropped/{cause}": count for cause, count in sorted(self.dropped.items())},
        }
