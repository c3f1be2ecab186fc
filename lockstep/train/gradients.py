"""A step's gradients between backward and update: accumulated in float32, used at once, or summed in a tree over the
step's micro-batches; and those of parameters besides the model's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.ops.linear import tree_sum
from lockstep.ops.one_order import Tree
from lockstep.parallel import World
from lockstep.parallel.exchange import gather_rows
from lockstep.train.gradient_norm import exact_norms, gradient_norms, local_squares, norms_of_squares

Parameters = Mapping[str, nn.Parameter]
"""The trained parameters, by name."""


class Gradients:
    """Accumulated over a step's micro-batches in float32.

    Autograd does so for float32 parameters. Each gradient of a narrower one is added to a float32 sum as soon as the
    backward has computed it. A step's first gradient is not widened until there is a second one to add: this saves a
    step of one micro-batch a pass over memory, since norms and AdamW read narrow gradients. On a CPU, where both give
    the same bits, it is widened at once if memory of the last step's sums can be reused.
    """

    def __init__(self, parameters: Parameters):
        self.parameters = parameters
        self._sums: dict[str, Tensor] = {}
        self._spare: dict[str, Tensor] = {}
        """Memory of the last step's float32 sums on a CPU, where new memory takes time to clear."""
        for name, parameter in parameters.items():
            if parameter.dtype != torch.float32:
                parameter.register_post_accumulate_grad_hook(partial(self._add, name))

    @property
    def updated_weights(self) -> bool:
        """Whether some gradient of this step has already changed weights, so that the step cannot be skipped."""
        return False

    def end_microbatch(self, of: Iterable[str] | None = None) -> None:
        """Call when a backward, including its sums over ranks, has ended for all parameters or those named."""

    @torch.no_grad()
    def _add(self, name: str, parameter: Tensor) -> None:
        grad, parameter.grad = parameter.grad, None
        assert grad is not None
        if name in self._sums:
            self._sums[name] = self._sums[name].float().add_(grad)
        else:
            spare = self._spare.pop(name, None)
            self._sums[name] = grad.contiguous() if spare is None else spare.copy_(grad)

    def pending(self) -> dict[str, Tensor]:
        """This step's gradients that no update has used yet, by parameter, in the model's order: float32, or the
        parameter's dtype."""
        grads = ((name, self._sums.get(name, p.grad)) for name, p in self.parameters.items())
        return {name: grad for name, grad in grads if grad is not None}

    def norms(self, stage_groups: Sequence[dist.ProcessGroup], shared: Collection[str]) -> dict[str, float]:
        """As `gradient_norm.gradient_norms`."""
        return gradient_norms(self.pending(), stage_groups, shared)

    def clear(self) -> None:
        """Drops all gradients at the end of a step."""
        self._spare = {
            name: grad
            for name, grad in self._sums.items()
            if grad.dtype != self.parameters[name].dtype and grad.device.type == "cpu"
        }
        self._sums.clear()
        for parameter in self.parameters.values():
            parameter.grad = None


class GradientsUsedInBackward(Gradients):
    """Updates a parameter as soon as the backward has computed its gradient, and frees the gradient."""

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
        grads, parameter.grad = {name: parameter.grad}, None
        self._squares |= local_squares(grads)
        self.update(grads)

    def pending(self) -> dict[str, Tensor]:
        return {}

    def norms(self, stage_groups: Sequence[dist.ProcessGroup], shared: Collection[str]) -> dict[str, float]:
        return norms_of_squares(self._squares, self.parameters, stage_groups)

    def clear(self) -> None:
        self._squares.clear()


class TreeSummedGradients(Gradients):
    """Sums in a binary tree over the step's micro-batches, neighbors first: one order for any number of ranks.

    Rank r of n has the micro-batches r, n + r, 2n + r and so on of a step. The sum of one micro-batch on each of n
    ranks, n a power of two, is a subtree, and the subtrees come in the order of the tree's leaves. For other n, the
    exchange over ranks adds up the leaves, and all gradients added here but the last are zero. Each stage of a
    pipeline has a separate tree.
    """

    def __init__(self, parameters: Parameters):
        self.parameters = parameters
        self._trees: dict[tuple[str, ...], Tree[dict[str, Tensor]]] = {}

    @torch.no_grad()
    def end_microbatch(self, of: Iterable[str] | None = None) -> None:
        names = tuple(name for name in (self.parameters if of is None else of) if name in self.parameters)
        leaf = {}
        for name in names:
            parameter = self.parameters[name]
            if parameter.grad is not None:
                leaf[name], parameter.grad = parameter.grad.float(), None
        self._trees.setdefault(names, Tree(_added)).add(leaf)

    @torch.no_grad()
    def pending(self) -> dict[str, Tensor]:
        sums = {name: grad for tree in self._trees.values() for name, grad in (tree.sum() or {}).items()}
        return {name: sums[name] for name in self.parameters if name in sums}

    def norms(self, stage_groups: Sequence[dist.ProcessGroup], shared: Collection[str]) -> dict[str, float]:
        return exact_norms(self.pending(), stage_groups)

    def clear(self) -> None:
        self._trees.clear()


def _added(first: dict[str, Tensor], second: dict[str, Tensor]) -> dict[str, Tensor]:
    """Adds in the memory of `first`; a parameter that only one of them has keeps its value."""
    for name, grad in second.items():
        first[name] = first[name].add_(grad) if name in first else grad
    return first


class ExtraParameters:
    """Parameters that a loss uses besides the model's, such as a value head's, and their gradients over several ranks.

    Every rank has these parameters unsharded. Of ranks that share a micro-batch, one has a gradient, or each has
    some elements of it; the others are zero.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], world: World):
        self.parameters = dict(parameters)
        self.world = world

    def take(self) -> dict[str, Tensor]:
        """This rank's gradients, zero where there are none; the parameters have none afterwards."""
        taken = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self.parameters.items()}
        for parameter in self.parameters.values():
            parameter.grad = None
        return taken

    @torch.no_grad()
    def sum_over_ranks(self) -> None:
        """Replaces each gradient by its sum over all ranks, in FSDP's order."""
        if self.world.mesh is None:
            return
        for name, grad in self.take().items():
            self.parameters[name].grad = tree_sum(self._gathered(grad).unbind())

    @torch.no_grad()
    def in_one_order(self, of_microbatches: Sequence[dict[str, Tensor]]) -> Iterator[None]:
        """Sets the gradients of each micro-batch of a step in turn, in the order of one process."""
        if not of_microbatches:
            return
        gathered = {name: self._by_data_rank([grads[name] for grads in of_microbatches]) for name in self.parameters}
        for microbatch, rank in itertools.product(range(len(of_microbatches)), range(self.world.data_size)):
            for name, parameter in self.parameters.items():
                parameter.grad = gathered[name][rank][microbatch]
            yield

    def _by_data_rank(self, grads: Sequence[Tensor]) -> list[Tensor]:
        stacked = torch.stack([*grads])
        if self.world.mesh is None:
            return [stacked]
        size = self.world.data_size
        gathered = self._gathered(stacked).unflatten(0, (self.world.degrees["pipeline"], size, -1))
        return [tree_sum(gathered[:, rank].flatten(0, 1).unbind()) for rank in range(size)]

    def _gathered(self, local: Tensor) -> Tensor:
        assert dist.group.WORLD is not None
        return gather_rows(local[None], dist.group.WORLD)
