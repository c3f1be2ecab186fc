"""The proof of every step: the generator's log-probabilities against the trainer's, bit by bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lockstep.rl.rollouts import Rollout


class ParityError(Exception):
    """A token's log-probability differs between generator and trainer."""


@dataclass
class Parity:
    """What has been compared so far."""

    tokens_checked: int = 0
    tokens_different: int = 0
    max_delta: float = 0.0
    sum_delta: float = field(default=0.0, compare=False)
    first: str = field(default="", compare=False)
    """The first difference in words: token, position, both values."""
    sequence: tuple[list[int], int] | None = field(default=None, compare=False)
    """The tokens of a sequence with a difference, and how many of them are its prompt."""

    def compare(
        self,
        generator: Float[Tensor, "tokens"],
        trainer: Float[Tensor, "tokens"],
        rollouts: Sequence[Rollout] = (),
        comparable: Bool[Tensor, "tokens"] | None = None,
    ) -> None:
        """Compares the bits of both sides' log-probabilities, of the rollouts' sampled tokens one after the other.

        comparable: those that both sides computed with the same weights; None: all. What is not finite counts as
        different, by infinity, though both sides have it.
        """
        trainer = trainer.detach()
        self.tokens_checked += generator.numel() if comparable is None else int(comparable.sum())
        # Equal bits of what is no number prove nothing.
        different = (generator.view(torch.int32) != trainer.view(torch.int32)) | ~generator.isfinite()
        if comparable is not None:
            different &= comparable
        count = int(different.sum())
        if not count:
            return
        self.tokens_different += count
        delta = (generator - trainer)[different].abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
        self.max_delta = max(self.max_delta, float(delta.max()))
        self.sum_delta += float(delta.double().sum())
        if not self.first:
            index = int(different.nonzero()[0, 0])
            values = f"generator {float(generator[index])!r}, trainer {float(trainer[index])!r}"
            place, self.sequence = _locate(rollouts, index)
            self.first = f"{place}: {values}"

    def plain(self) -> dict[str, Any]:
        """JSON-able, for `take`."""
        return dataclasses.asdict(self)

    def take(self, parts: Sequence[Mapping[str, Any]]) -> None:
        """Becomes what several ranks have compared; `first` is that of the first rank with a difference."""
        self.tokens_checked = sum(part["tokens_checked"] for part in parts)
        self.tokens_different = sum(part["tokens_different"] for part in parts)
        self.max_delta = max(part["max_delta"] for part in parts)
        self.sum_delta = sum(part["sum_delta"] for part in parts)
        one = next((part for part in parts if part["first"]), None)
        if one is not None:
            self.first, self.sequence = one["first"], one["sequence"] and tuple(one["sequence"])

    def metrics(self) -> dict[str, float]:
        """`parity/mean_delta`, over all tokens, only where any of them differ."""
        mean = {"parity/mean_delta": self.sum_delta / self.tokens_checked} if self.tokens_different else {}
        return {
            "parity/tokens_checked": self.tokens_checked,
            "parity/tokens_different": self.tokens_different,
            "parity/max_delta": self.max_delta,
            **mean,
        }


def _locate(rollouts: Sequence[Rollout], index: int) -> tuple[str, tuple[list[int], int] | None]:
    for rollout in rollouts:
        targets = rollout.targets()
        if index < len(targets):
            tokens, position = [*rollout.prompt_ids, *rollout.token_ids], targets[index]
            place = f"token {tokens[position]} at position {position} after {rollout.example.prompt[:60]!r}"
            return place, (tokens, len(rollout.prompt_ids))
        index -= len(targets)
    return f"token {index}", None
