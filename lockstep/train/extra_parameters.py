"""Parameters that a loss uses besides the model's, such as a value head's, and their gradients over several ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.ops.linear import tree_sum
from lockstep.parallel import World
from lockstep.parallel.exchange import gather_rows

Gradients = dict[str, Tensor]


class ExtraParameters:
    """Every rank has these parameters unsharded. Of ranks that share a micro-batch, one has a gradient, or each has
    some elements of it; the others are zero."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], world: World):
        self.parameters = dict(parameters)
        self.world = world

    def take(self) -> Gradients:
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
    def in_one_order(self, of_microbatches: Sequence[Gradients]) -> Iterator[None]:
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
