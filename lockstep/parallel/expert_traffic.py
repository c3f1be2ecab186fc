"""How many bytes this rank sends to other ranks' experts, and how many rows come to its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist


class ExpertTraffic:
    """Counts from `clear` to `take`. Of this process: it trains one model at a time."""

    def __init__(self) -> None:
        self.bytes = 0
        """Of rows that left this rank, and came back from it, forward and backward."""
        self.rows: list[int] = []
        """That arrived, of each forward through a layer."""
        self.first_rank = 0
        """Of the ranks that share the experts: what tells those ranks from others."""

    def clear(self) -> None:
        """At the beginning of a step, for validation travels too."""
        self.bytes, self.rows = 0, []

    def note_call(self, rows: int, group: dist.ProcessGroup) -> None:
        self.rows.append(rows)
        self.first_rank = dist.get_process_group_ranks(group)[0]

    def take(self, gather: Callable[[Any], list[Any]]) -> dict[str, float]:
        """As metrics, the same on every rank. All ranks call it: `gather` is `World.gather`.

        `experts/sent_mib`, of the rank that sends most, and `experts/imbalance`: the rows of the rank with most over
        the mean, layer by layer, each layer with the weight of its rows: how much longer the ranks take than if all had
        as many. Nothing where no experts are shared.
        """
        everyone = gather([self.bytes, self.first_rank, self.rows])
        by_group: dict[int, list[list[int]]] = {}
        for _, first, rows in everyone:
            if rows:
                by_group.setdefault(first, []).append(rows)
        if not by_group:
            return {}
        calls = [call for ranks in by_group.values() for call in zip(*ranks)]
        mean = sum(sum(call) / len(call) for call in calls)
        return {
            "experts/sent_mib": max(sent for sent, _, _ in everyone) / 2**20,
            "experts/imbalance": sum(max(call) for call in calls) / mean if mean else 1.0,
        }


TRAFFIC = ExpertTraffic()
