"""Compares the generator's log-probabilities with the trainer's in every step, bit for bit."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lockstep.generate.routes import read_route, shortened, written
from lockstep.model import Decoder, ModelConfig
from lockstep.rl.rollouts.records import Rollout
from lockstep.rl.scoring.explain import in_words


class ParityError(Exception):
    """A token's log-probability differs between generator and trainer."""


@dataclass
class Parity:
    """The result of the comparison so far."""

    tokens_checked: int = 0
    tokens_different: int = 0
    max_delta: float = 0.0
    sum_delta: float = field(default=0.0, compare=False)
    first: str = field(default="", compare=False)
    """The first difference in words: token, position, both values."""
    routes_checked: int = field(default=0, compare=False)
    """Tokens for which the experts of all layers were compared."""
    routes_different: int = field(default=0, compare=False)
    first_route: str = field(default="", compare=False)
    """The first of these in words: token, position, layer, both sides' experts."""
    sequence: tuple[list[int], int] | None = field(default=None, compare=False)
    """The tokens of a sequence with a difference, and how many of them are its prompt."""

    def compare(
        self,
        generator: Float[Tensor, "tokens"],
        trainer: Float[Tensor, "tokens"],
        rollouts: Sequence[Rollout] = (),
        comparable: Bool[Tensor, "tokens"] | None = None,
    ) -> None:
        """Compares the bits of both sides' log-probabilities, for the rollouts' sampled tokens in order.

        comparable: those that both sides computed with the same weights; None: all. A value that is not finite counts
        as different, by infinity, even if both sides have it.
        """
        trainer = trainer.detach()
        self.tokens_checked += generator.numel() if comparable is None else int(comparable.sum())
        # Equal bits of values that are not finite prove nothing.
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

    def compare_routes(
        self,
        rollouts: Sequence[Rollout],
        trainer: Sequence[bytes],
        shape: ModelConfig,
        comparable: Bool[Tensor, "tokens"] | None = None,
    ) -> None:
        """Compares the experts of both sides, including their order, if the rollouts have theirs.

        trainer: the full route of each of the rollouts' sampled tokens, in order. comparable: as in `compare`.
        """
        generator = [route for r in rollouts for route in r.routes or [""] * r.num_sampled]
        compared = [True] * len(generator) if comparable is None else comparable.tolist()
        for index, (theirs, ours, counts) in enumerate(zip(generator, trainer, compared, strict=True)):
            if not theirs or not counts:
                continue
            self.routes_checked += 1
            if theirs == written(ours) or shortened(theirs) == written(ours, "digest"):
                continue
            self.routes_different += 1
            if not self.first_route:
                place, sequence = _locate(rollouts, index)
                self.sequence = self.sequence or sequence
                self.first_route = f"{place}: {_routes_in_words(theirs, written(ours), shape)}"

    def plain(self) -> dict[str, Any]:
        """JSON-able, for `combine`."""
        return dataclasses.asdict(self)

    def combine(self, parts: Sequence[Mapping[str, Any]]) -> None:
        """Takes the combined result of several ranks; `first` is that of the first rank with a difference."""
        self.tokens_checked = sum(part["tokens_checked"] for part in parts)
        self.tokens_different = sum(part["tokens_different"] for part in parts)
        self.max_delta = max(part["max_delta"] for part in parts)
        self.sum_delta = sum(part["sum_delta"] for part in parts)
        self.routes_checked = sum(part["routes_checked"] for part in parts)
        self.routes_different = sum(part["routes_different"] for part in parts)
        self.first_route = next((part["first_route"] for part in parts if part["first_route"]), "")
        self.first = next((part["first"] for part in parts if part["first"]), "")
        sequence = next((part["sequence"] for part in parts if part["sequence"]), None)
        self.sequence = sequence and (sequence[0], sequence[1])

    def in_words(self) -> str:
        """What differs, and where first."""
        sentences = []
        if self.tokens_different:
            sentences.append(
                f"{self.tokens_different} of {self.tokens_checked} log-probabilities differ between generator and "
                f"trainer (by up to {self.max_delta:.3e}); the first is {self.first}"
            )
        if self.routes_different:
            sentences.append(
                f"{self.routes_different} of {self.routes_checked} tokens had different experts in the generator and "
                f"the trainer; the first is {self.first_route}"
            )
        return ". ".join(sentences)

    def require_equal(
        self, step: int, on_error: Literal["stop", "warn", "measure"], model: Decoder | None = None
    ) -> None:
        """Stops the run or warns if log-probabilities or routes of a step differ but should not. Raises ParityError.

        model: used, on all ranks together, to find the operator that differs; None: no rank has the whole policy.
        """
        if not (self.tokens_different or self.routes_different) or on_error == "measure":
            return
        message = f"step {step}: {self.in_words()}. " + in_words(model, self.sequence)
        if on_error == "stop":
            raise ParityError(message + "; set on_parity_error = warn to continue anyway")
        warnings.warn(message, stacklevel=2)

    def metrics(self) -> dict[str, float]:
        """Includes `parity/mean_delta`, over all tokens, only if any differ, and routes only if there are any."""
        mean = {"parity/mean_delta": self.sum_delta / self.tokens_checked} if self.tokens_different else {}
        return {
            "parity/tokens_checked": self.tokens_checked,
            "parity/tokens_different": self.tokens_different,
            "parity/max_delta": self.max_delta,
            **mean,
            **self._of_routes(),
        }

    def _of_routes(self) -> dict[str, float]:
        if not self.routes_checked:
            return {}
        return {"parity/routes_checked": self.routes_checked, "parity/routes_different": self.routes_different}


def _routes_in_words(generator: str, trainer: str, shape: ModelConfig) -> str:
    """The first layer whose experts differ."""
    theirs, ours = read_route(generator, shape), read_route(trainer, shape)
    if theirs is None or ours is None:
        return "experts differ (only their digests were compared)"
    place = int((theirs != ours).any(-1).nonzero()[0][0])
    layer = shape.mixtures[place]
    sides = f"{theirs[place].tolist()} in the generator, {ours[place].tolist()} in the trainer"
    return f"layer {layer} chose experts {sides}"


def _locate(rollouts: Sequence[Rollout], index: int) -> tuple[str, tuple[list[int], int] | None]:
    for rollout in rollouts:
        targets = rollout.targets()
        if index < len(targets):
            tokens, position = [*rollout.prompt_ids, *rollout.token_ids], targets[index]
            place = f"token {tokens[position]} at position {position} after {rollout.example.text[:60]!r}"
            return place, (tokens, len(rollout.prompt_ids))
        index -= len(targets)
    return f"token {index}", None
