"""A step's gradients between backward and update: kept by autograd, summed apart in float32, used at once, or summed in
a tree over the step's micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.train.gradient_norm import exact_norms, gradient_norms, local_squares, norms_of_squares

Parameters = Mapping[str, nn.Parameter]
"""Those that are trained, by name."""


@runtime_checkable
class Gradients(Protocol):
    """What `MasterOptimizer` asks of them, whichever of those below they are."""

    @property
    def updated_weights(self) -> bool:
        """Whether some gradient of this step has changed weights already, so that the step cannot be skipped."""
        ...

    def end_microbatch(self, of: Iterable[str] | None = None) -> None:
        """A backward has ended, and with it what ranks sum after it: for all parameters, or those of these names."""
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

    def end_microbatch(self, of: Iterable[str] | None = None) -> None:
        pass

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

    def end_microbatch(self, of: Iterable[str] | None = None) -> None:
        pass

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

    def end_microbatch(self, of: Iterable[str] | None = None) -> None:
        pass

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


class GradientsInATree:
    """Summed in a binary tree over the step's micro-batches, neighbours first: one order, however ranks share them.

    Rank r of n has the micro-batches r, n + r, 2n + r and so on of a step. What n ranks have summed of theirs is a
    subtree, n a power of two, and the subtrees come in the order of the tree's leaves. The stages of a pipeline have a
    tree each.
    """

    updated_weights = False

    def __init__(self, parameters: Parameters):
        self.parameters = parameters
        self._trees: dict[tuple[str, ...], _Tree] = {}

    @torch.no_grad()
    def end_microbatch(self, of: Iterable[str] | None = None) -> None:
        names = tuple(name for name in (self.parameters if of is None else of) if name in self.parameters)
        leaf = {}
        for name in names:
            parameter = self.parameters[name]
            if parameter.grad is not None:
                leaf[name], parameter.grad = parameter.grad.float(), None
        self._trees.setdefault(names, _Tree()).add(leaf)

    def held(self) -> dict[str, Tensor]:
        found = {name: grad for tree in self._trees.values() for name, grad in tree.sum().items()}
        return {name: found[name] for name in self.parameters if name in found}

    def norms(self, stage_groups: Iterable[dist.ProcessGroup]) -> dict[str, float]:
        return exact_norms(self.held(), stage_groups)

    def clear(self) -> None:
        self._trees.clear()


class _Tree:
    def __init__(self) -> None:
        self._subtrees: list[dict[str, Tensor]] = []
        """Whole ones, each smaller than the one before it."""
        self._count = 0

    @torch.no_grad()
    def add(self, leaf: dict[str, Tensor]) -> None:
        # As a binary counter carries: two subtrees of one size make the next larger one.
        self._count += 1
        for _ in range((self._count & -self._count).bit_length() - 1):
            leaf = _added(self._subtrees.pop(), leaf)
        self._subtrees.append(leaf)

    @torch.no_grad()
    def sum(self) -> dict[str, Tensor]:
        """Of all leaves; none may be added after it."""
        while len(self._subtrees) > 1:
            smallest = self._subtrees.pop()
            self._subtrees.append(_added(self._subtrees.pop(), smallest))
        return self._subtrees[0] if self._subtrees else {}


def _added(first: dict[str, Tensor], second: dict[str, Tensor]) -> dict[str, Tensor]:
    """In the memory of `first`; a parameter that one of them lacks has what the other has."""
    for name, grad in second.items():
        first[name] = first[name].add_(grad) if name in first else grad
    return first
