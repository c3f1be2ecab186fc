"""A step's gradients between backward and update: kept by autograd, summed apart in float32, or used at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.train.gradient_norm import gradient_norms, local_squares, norms_of_squares

Parameters = Mapping[str, nn.Parameter]
"""Those that are trained, by name."""


@runtime_checkable
class Gradients(Protocol):
    """What `MasterOptimizer` asks of them, whichever of the three below they are."""

    @property
    def updated_weights(self) -> bool:
        """Whether some gradient of this step has changed weights already, so that the step cannot be skipped."""
        ...

    def held(self) -> dict[str, Tensor]:
        """float32, by parameter, in the model's order: of this step alone, and what an update still has to use."""
        ...

    def norms(self, stage_groups: Iterable[dist.ProcessGroup]) -> dict[str, float]:
        """As `gradient_norm.gradient_norms`."""
        ...

    def clear(self) -> None:
        """The step is over: none is held any more."""
        ...


class OwnGradients:
    """Of float32 parameters, which are their own masters: autograd adds up in float32 as it is."""

    updated_weights = False

    def __init__(self, parameters: Parameters):
        self.parameters = parameters

    def held(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def norms(self, stage_groups: Iterable[dist.ProcessGroup]) -> dict[str, float]:
        return gradient_norms(self.held(), stage_groups)

    def clear(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None


class SummedGradients:
    """Of narrower parameters: each is added to its float32 sum as soon as backward has made it.

    So micro-batches accumulate exactly, and a bfloat16 gradient lives only for a moment.
    """

    updated_weights = False

    def __init__(self, parameters: Parameters):
        self.parameters = parameters
        self._sums: dict[str, Tensor] = {}
        self._spare: dict[str, Tensor] = {}
        """Memory of the last step's sums, which the next ones write over."""
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(partial(self._add, name))

    @torch.no_grad()
    def _add(self, name: str, parameter: Tensor) -> None:
        grad, parameter.grad = parameter.grad, None
        assert grad is not None
        if name in self._sums:
            self._sums[name].add_(grad)
        elif (spare := self._spare.pop(name, None)) is not None:
            self._sums[name] = spare.copy_(grad)
        else:
            self._sums[name] = grad.float()

    def held(self) -> dict[str, Tensor]:
        return {name: self._sums[name] for name in self.parameters if name in self._sums}

    def norms(self, stage_groups: Iterable[dist.ProcessGroup]) -> dict[str, float]:
        return gradient_norms(self.held(), stage_groups)

    def clear(self) -> None:
        self._spare |= self._sums
        self._sums.clear()


class GradientsUsedAtOnce:
    """Updates a parameter as soon as backward has made its gradient, and lets the gradient go."""

    def __init__(self, parameters: Parameters, update: Callable[[dict[str, Tensor]], None]):
        self.parameters = parameters
        self.update = update
        self._squares: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(partial(self._use, name))

    @property
    def updated_weights(self) -> bool:
        return bool(self._squares)

    @torch.no_grad()
    def _use(self, name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        grads, parameter.grad = {name: parameter.grad.float()}, None
        self._squares |= local_squares(grads)
        self.update(grads)

    def held(self) -> dict[str, Tensor]:
        return {}

    def norms(self, stage_groups: Iterable[dist.ProcessGroup]) -> dict[str, float]:
        return norms_of_squares(self._squares, self.parameters, stage_groups)

    def clear(self) -> None:
        self._squares.clear()
