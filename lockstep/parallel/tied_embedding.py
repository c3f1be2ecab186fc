"""One weight for embedding and head, where a pipeline has them on different stages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.model.shard import local_part
from lockstep.parallel.pipeline_stage import Stage

TAG = 1
"""Of gradients that travel while a schedule's own messages do, which have 0."""


class TiedEmbedding:
    """The first stage owns the weight: there it is initialised, updated, saved and counted in the gradient's norm.

    The last stage borrows it for each step and gives its gradient back. Does nothing where they are not tied.
    """

    def __init__(self, stages: Sequence[Stage], last_rank: int, group: dist.ProcessGroup, dtype: torch.dtype):
        tied = [stage for stage in stages if stage.config.tie_embeddings]
        self.owner = next((stage for stage in tied if stage.is_first), None)
        self.borrower = next((stage for stage in tied if stage.is_last), None)
        self.last_rank = last_rank
        self.group = group
        self.dtype = dtype
        self._kept: list[Tensor] = []
        """Gradients of the borrower's on the owner's own rank."""
        self._sent: list[tuple[dist.Work, Tensor]] = []
        self._weights: tuple[Tensor | None, Tensor | None] | None = None

    @torch.no_grad()
    def lend_weight(self) -> None:
        """Writes the owner's weight into the borrower's, of a sharded one each rank its own shard."""
        owned, borrowed = self._parameters()
        source = None if owned is None else local_part(owned)[0]
        target = None if borrowed is None else local_part(borrowed)[0]
        self._move(source, target, 0, self.last_rank)

    @torch.no_grad()
    def collect_gradient(self) -> None:
        """Adds the borrower's gradient to the owner's, and drops it."""
        owned, borrowed = self._parameters()
        source = target = None
        if borrowed is not None:
            assert borrowed.grad is not None
            source = local_part(borrowed.grad)[0]
        if owned is not None:
            target = torch.empty_like(local_part(owned)[0])
        self._move(source, target, self.last_rank, 0)
        if borrowed is not None:
            borrowed.grad = None
        if owned is not None and target is not None and owned.grad is not None:
            local_part(owned.grad)[0].add_(target)

    @torch.no_grad()
    def join_gradient(self, stage: Stage) -> None:
        """`collect_gradient` for one micro-batch, after its backward through `stage`; `wait` after the last of them.

        The last stage is through with a micro-batch before the first is, and what it has sent is on its way.
        """
        owned, borrowed = self._parameters()
        if stage is self.borrower:
            assert borrowed is not None and borrowed.grad is not None
            source, borrowed.grad = local_part(borrowed.grad)[0].contiguous(), None
            if self.owner is not None:
                self._kept.append(source)
            else:
                work = dist.isend(source, group=self.group, group_dst=0, tag=TAG)
                assert work is not None
                self._sent.append((work, source))
        if stage is self.owner:
            assert owned is not None
            if self.borrower is not None:
                source = self._kept.pop(0)
            else:
                source = torch.empty_like(local_part(owned)[0])
                dist.recv(source, group=self.group, group_src=self.last_rank, tag=TAG)
            if owned.grad is not None:  # of a frozen weight nothing is wanted
                # As autograd adds the two where they are one parameter: in the dtype of the computation.
                target = local_part(owned.grad)[0]
                target.copy_(target.to(self.dtype) + source.to(self.dtype))

    def wait(self) -> None:
        """Until what was sent has arrived."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _parameters(self) -> tuple[Tensor | None, Tensor | None]:
        if self._weights is None:
            # Once, before the first forward: later the modules may show the gathered weights instead.
            owned = self.owner.embed_tokens.weight if self.owner is not None else None
            borrowed = self.borrower.embed_tokens.weight if self.borrower is not None else None
            self._weights = owned, borrowed
        return self._weights

    def _move(self, source: Tensor | None, target: Tensor | None, sender: int, receiver: int) -> None:
        if source is not None and target is not None:
            target.copy_(source)
        elif source is not None:
            dist.send(source.contiguous(), group=self.group, group_dst=receiver)
        elif target is not None:
            dist.recv(target, group=self.group, group_src=sender)
