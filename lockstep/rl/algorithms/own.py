"""A loss and advantages of the user's own: what the functions get, and the check of what they return."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from lockstep.errors import UserError
from lockstep.python_file import user_line
from lockstep.rl.algorithms.losses import LossFunction, PolicyLossInputs

Metrics = dict[str, Tensor | float]
TAKEN = ("ratio", "kl", "entropy", "staleness")
"""A run has metrics `policy/…` whose names begin so."""


@dataclass(frozen=True)
class AdvantageInputs:
    """What advantages are a function of: a step's graded completions, group by group.

    A conversation counts as one completion. Groups can differ in size, if some rewards failed.
    """

    rewards: Sequence[Tensor]
    """Of each group `[completions]`, float64: the totals that are trained on, with `kl_in = "reward"` less the KL
    penalty."""
    lengths: Sequence[Sequence[int]]
    """Sampled tokens of each completion of each group."""
    log_probs: Sequence[Sequence[Tensor]]
    """Of each completion `[tokens]`, by the policy that sampled it; float32, as those below."""
    reference_log_probs: Sequence[Sequence[Tensor]] | None = None
    """Of the reference model, if the run has a `kl_coefficient`."""
    teacher_log_probs: Sequence[Sequence[Tensor]] | None = None
    """Of the teacher, if the run has one."""


AdvantageFunction = Callable[[AdvantageInputs], Sequence[Any]]
"""Advantages of the user's own: for each group a tensor or a list, with one number for each completion, or with one
number for each token of each completion."""


class OwnFunction:
    """A function of the user's, whose errors name its line."""

    def __init__(self, function: Callable[..., Any]):
        """Raises UserError for what cannot be called with one argument."""
        self.function = function
        self.name = getattr(function, "__qualname__", repr(function)[:60])
        try:
            inspect.signature(function).bind("inputs")
        except TypeError as error:
            raise UserError(f"{self.where} cannot be called ({error}); write `def {self.name}(inputs)`") from error

    @cached_property
    def file(self) -> Path | None:
        code = getattr(self.function, "__code__", None)
        return Path(code.co_filename) if code else None

    @cached_property
    def where(self) -> str:
        """Names the function in messages."""
        return f"{self.file}: {self.name}" if self.file else self.name

    def returned(self, inputs: PolicyLossInputs | AdvantageInputs) -> Any:
        """What the function returns. Raises UserError, naming the line, if it raises."""
        try:
            return self.function(inputs)
        except Exception as error:
            raise UserError(
                f"{user_line(error, self.file)}: {self.name} raises {type(error).__name__}: {error}; correct it"
            ) from error


class OwnLoss(OwnFunction):
    """A `LossFunction` whose result is checked at every call."""

    def __call__(self, inputs: PolicyLossInputs) -> tuple[Float[Tensor, "tokens"], Metrics]:
        """Raises UserError for anything but one loss per token with a gradient, and a dict of numbers."""
        result, tokens = self.returned(inputs), inputs.log_probs.numel()
        if not isinstance(result, tuple) or len(result) != 2:
            raise UserError(
                f"{self.where} returns {_described(result)}; return a pair: one loss per token, and a dict of metrics"
            )
        losses, metrics = result
        if not isinstance(losses, Tensor) or losses.shape != inputs.log_probs.shape:
            raise UserError(
                f"{self.where} returns {_described(losses)} for {tokens} tokens; return one loss per token, without "
                "weighting or summing them: the run does that by loss_average"
            )
        if (losses.dtype, losses.device) != (inputs.log_probs.dtype, inputs.log_probs.device):
            raise UserError(
                f"{self.where} returns losses in {losses.dtype} on {losses.device}; return them as the inputs are, in "
                f"{inputs.log_probs.dtype} on {inputs.log_probs.device}"
            )
        if inputs.log_probs.requires_grad and not losses.requires_grad:
            raise UserError(
                f"{self.where} returns losses without a gradient; compute them from inputs.log_probs, without detach() "
                "or no_grad()"
            )
        return losses, self._metrics(metrics)

    def _metrics(self, metrics: Any) -> Metrics:
        if not isinstance(metrics, Mapping):
            raise UserError(f"{self.where} returns {_described(metrics)} as metrics; return a dict, {{}} for none")
        for name, value in metrics.items():
            if not isinstance(name, str) or not name or name.startswith(TAKEN):
                raise UserError(
                    f"{self.where} returns a metric named {name!r:.60}; give it a name that does not begin with "
                    f"{', '.join(TAKEN)}, which the run's own have"
                )
            is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.ndim == 0)
            if not is_number:
                raise UserError(
                    f"{self.where} returns {_described(value)} as the metric {name}; return one number, such as "
                    "inputs.average(values)"
                )
        return dict(metrics)


class OwnAdvantages(OwnFunction):
    """An `AdvantageFunction` whose result is checked at every call."""

    def __call__(self, inputs: AdvantageInputs) -> list[list[float]] | list[list[list[float]]]:
        """As `advantages_of_groups`."""
        return advantages_of_groups(self.returned(inputs), inputs.lengths, f"{self.where} returns")


def own_loss(function: LossFunction | None) -> OwnLoss | None:
    """The function with its results checked; None for None."""
    return None if function is None else OwnLoss(function)


def advantages_of_groups(
    advantages: Any, lengths: Sequence[Sequence[int]], where: str
) -> list[list[float]] | list[list[list[float]]]:
    """Advantages, for each group one per completion or one per token of each completion, as plain numbers.

    lengths: of the completions, as in `AdvantageInputs`. where: begins messages, such as `the advantages are`. Raises
    UserError, naming group and completion, for another number of them and for what is not a finite number.
    """
    groups = _listed(advantages)
    if len(groups) != len(lengths):
        raise UserError(f"{where} {_counted(groups, 'group')} for {len(lengths)}; give one list or tensor per group")
    of_groups = []
    for number, (group, of_completions) in enumerate(zip(groups, lengths)):
        values = [_listed(value) if _is_list(value) else value for value in _listed(group)]
        if len(values) != len(of_completions):
            raise UserError(
                f"{where} {_counted(values, 'advantage')} for group {number}, which has {len(of_completions)} "
                "completions; give one per completion, or one list per completion with one per token"
            )
        for index, (value, tokens) in enumerate(zip(values, of_completions)):
            if isinstance(value, list) and len(value) != tokens:
                raise UserError(
                    f"{where} {_counted(value, 'advantage')} for completion {index} of group {number}, which has "
                    f"{tokens} tokens; give one per token"
                )
            if wrong := [v for v in (value if isinstance(value, list) else [value]) if not _is_finite(v)]:
                raise UserError(
                    f"{where} {wrong[0]!r:.60} for completion {index} of group {number}; give finite numbers, also for "
                    "groups of equal rewards"
                )
        of_groups.append(values)
    if len({isinstance(value, list) for values in of_groups for value in values}) > 1:
        raise UserError(f"{where} one advantage for some completions and one per token for others; give one kind")
    return of_groups


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) or (isinstance(value, Tensor) and value.ndim > 0)


def _listed(value: Any) -> list[Any]:
    """The items of a list, of which tensors without a dimension become numbers; a tensor's as numbers and lists."""
    if isinstance(value, Tensor):
        return list(value.tolist()) if value.ndim else [value.item()]
    items = list(value) if isinstance(value, Sequence) else [value]
    return [item.item() if isinstance(item, Tensor) and item.ndim == 0 else item for item in items]


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _counted(values: Sequence[Any], noun: str) -> str:
    return f"{len(values)} {noun}{'' if len(values) == 1 else 's'}"


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"{type(value).__name__} {value!r:.60}"
