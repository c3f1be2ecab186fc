"""What became of every prompt of a whole run: trained on, dropped for a cause, or under way; none twice, none lost."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from lockstep.checkpoint import newest_checkpoint
from lockstep.checkpoint.folders import STATE
from lockstep.observe import RunFolder


@dataclass(frozen=True)
class PromptBalance:
    """Counts of prompts, as far as the newest checkpoint."""

    asked: int
    trained: int
    dropped: dict[str, int]
    """By cause."""
    under_way: int
    """Asked for steps that come after the checkpoint, which holds them."""
    repeated: int
    """Those that more than one step has, or one step twice."""
    lost: int
    """Asked, but neither trained on nor dropped nor under way."""

    def text(self) -> str:
        """In a sentence."""
        dropped = f"{sum(self.dropped.values())} dropped"
        if self.dropped:
            dropped += " (" + ", ".join(f"{count} {cause}" for cause, count in sorted(self.dropped.items())) + ")"
        under_way = f", {self.under_way} under way" if self.under_way else ""
        return (
            f"{self.asked} prompts asked: {self.trained} trained on, {dropped}{under_way}, {self.repeated} repeated, "
            f"{self.lost} lost"
        )


def prompt_balance(run: Path) -> PromptBalance | None:
    """Holds the prompts of a run's steps against those that its newest checkpoint says it has asked.

    None for a run without a checkpoint, or of a version that did not write down its prompts. Raises UserError where no
    checkpoint is whole.
    """
    file, checkpoint = RunFolder(run).prompts, newest_checkpoint(run)
    if checkpoint is None or not file.is_file():
        return None
    state = json.loads((checkpoint / STATE).read_text())
    lines = [line for line in map(json.loads, file.read_text().splitlines()) if line["step"] <= state["step"]]
    if "left_out" not in state["prompts"] or [line["step"] for line in lines] != list(range(1, state["step"] + 1)):
        return None
    under_way = state["ahead"]["prompts"]
    dropped = Counter({cause: 0 for line in lines for cause in line["dropped"]})
    held = Counter(under_way)
    for line in lines:
        held.update(line["trained"])
        for cause, places in line["dropped"].items():
            dropped[cause] += len(places)
            held.update(places)
    asked = state["prompts"]["position"] - state["prompts"]["left_out"]
    return PromptBalance(
        asked=asked,
        trained=sum(len(line["trained"]) for line in lines),
        dropped=dict(dropped),
        under_way=len(under_way),
        repeated=sum(count > 1 for count in held.values()),
        lost=asked - len(held),
    )
