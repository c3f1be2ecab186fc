"""Metrics of expert parallelism: bytes sent to other ranks' experts, and rows received by this rank's experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist


class ExpertTraffic:
    """Counts from `clear` to `take`. Global, since a process trains one model at a time."""

    def __init__(self) -> None:
        self.bytes = 0
        """Bytes of rows sent by this rank, to experts and back, forward and backward."""
        self.rows: list[int] = []
        """Rows that arrived in each forward through a layer."""
        self.first_rank = 0
        """The first rank of the group that shares the experts, which identifies the group."""

    def clear(self) -> None:
        """Call at the beginning of a step, since validation sends rows too."""
        self.bytes, self.rows = 0, []

    def note_call(self, rows: int, group: dist.ProcessGroup) -> None:
        self.rows.append(rows)
        self.first_rank = dist.get_process_group_ranks(group)[0]

    def take(self, gather: Callable[[Any], list[Any]]) -> dict[str, float]:
        """The metrics, the same on every rank. All ranks call it; `gather` is `World.gather`.

        `experts/sent_mib`: of the rank that sends the most. `experts/imbalance`: the largest number of rows of a rank
        relative to the mean, per layer, weighted by the layer's rows: the slowdown compared with an even load. Empty if
        no experts are shared.
        """
        of_all_ranks = gather([self.bytes, self.first_rank, self.rows])
        by_group: dict[int, list[list[int]]] = {}
        for _, first, rows in of_all_ranks:
            if rows:
                by_group.setdefault(first, []).append(rows)
        if not by_group:
            return {}
        calls = [call for ranks in by_group.values() for call in zip(*ranks)]
        mean = sum(sum(call) / len(call) for call in calls)
        return {
            "experts/sent_mib": max(sent for sent, _, _ in of_all_ranks) / 2**20,
            "experts/imbalance": sum(max(call) for call in calls) / mean if mean else 1.0,
        }


TRAFFIC = ExpertTraffic()
