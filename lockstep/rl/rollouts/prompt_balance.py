"""What happened to every prompt of a run: trained on, dropped for a cause, or in flight; none twice, none lost."""

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
    """Counts of prompts, up to the newest checkpoint."""

    asked: int
    trained: int
    dropped: dict[str, int]
    """By cause."""
    in_flight: int
    """Requested for steps after the checkpoint, which contains them."""
    repeated: int
    """Used by more than one step, or twice by one step."""
    lost: int
    """Requested, but neither trained on nor dropped nor in flight."""

    def text(self) -> str:
        """The counts as a sentence."""
        dropped = f"{sum(self.dropped.values())} dropped"
        if self.dropped:
            dropped += " (" + ", ".join(f"{count} {cause}" for cause, count in sorted(self.dropped.items())) + ")"
        in_flight = f", {self.in_flight} in flight" if self.in_flight else ""
        return (
            f"{self.asked} prompts requested: {self.trained} trained on, {dropped}{in_flight}, "
            f"{self.repeated} repeated, {self.lost} lost"
        )


def prompt_balance(run: Path) -> PromptBalance | None:
    """Compares the prompts of a run's steps with those that it requested according to its newest checkpoint.

    None for a run without a checkpoint. Raises UserError if no checkpoint is complete.
    """
    file, checkpoint = RunFolder(run).prompts, newest_checkpoint(run)
    if checkpoint is None or not file.is_file():
        return None
    state = json.loads((checkpoint / STATE).read_text())
    lines = [line for line in map(json.loads, file.read_text().splitlines()) if line["step"] <= state["step"]]
    in_flight = state["ahead"]["prompts"]
    dropped = Counter({cause: 0 for line in lines for cause in line["dropped"]})
    positions = Counter(in_flight)
    for line in lines:
        positions.update(line["trained"])
        for cause, places in line["dropped"].items():
            dropped[cause] += len(places)
            positions.update(places)
    requested = state["prompts"]["position"] - state["prompts"]["left_out"]
    return PromptBalance(
        asked=requested,
        trained=sum(len(line["trained"]) for line in lines),
        dropped=dict(dropped),
        in_flight=len(in_flight),
        repeated=sum(count > 1 for count in positions.values()),
        lost=requested - len(positions),
    )
