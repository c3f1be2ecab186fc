"""Tied embedding and head on different pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.model.shard import is_fsdp, local_part, local_values
from lockstep.parallel.pipeline_stage import Stage

TAG = 1
"""The tag of gradients sent concurrently with a schedule's own messages, which have tag 0."""


class TiedEmbedding:
    """The first stage owns the weight: it is initialized, updated, saved and counted in the gradient norm there.

    The last stage gets a copy before each step, and sends its gradient back. Does nothing if they are not tied.
    """

    def __init__(self, stages: Sequence[Stage], last_rank: int, group: dist.ProcessGroup, dtype: torch.dtype):
        tied = [stage for stage in stages if stage.config.tie_embeddings]
        self.owner = next((stage for stage in tied if stage.is_first), None)
        self.borrower = next((stage for stage in tied if stage.is_last), None)
        self.last_rank = last_rank
        self.group = group
        self.dtype = dtype
        self._local_gradients: list[Tensor] = []
        """The borrower's gradients, if owner and borrower are on one rank."""
        self._sent: list[tuple[dist.Work, Tensor]] = []
        self._weights: tuple[Tensor | None, Tensor | None] | None = None

    @torch.no_grad()
    def lend_weight(self) -> None:
        """Copies the owner's weight to the borrower; if it is sharded, each rank copies its own shard."""
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
        """`collect_gradient` for one micro-batch, after its backward through `stage`; call `wait` after the last one.

        Called before the sum over data ranks, as autograd first adds the two if they are one parameter. The last stage
        finishes a micro-batch before the first stage does, so its gradient has been sent by then.
        """
        if stage is self.borrower:
            gradient = UnsummedGradient(stage, stage.embed_tokens)
            assert gradient.values is not None
            source = gradient.values.contiguous()
            gradient.drop()
            if self.owner is not None:
                self._local_gradients.append(source)
            else:
                work = dist.isend(source, group=self.group, group_dst=0, tag=TAG)
                assert work is not None
                self._sent.append((work, source))
        if stage is self.owner:
            gradient = UnsummedGradient(stage, stage.embed_tokens)
            if self.borrower is not None:
                source = self._local_gradients.pop(0)
            else:
                source = gradient.empty_like()
                dist.recv(source, group=self.group, group_src=self.last_rank, tag=TAG)
            if (target := gradient.values) is not None:  # a frozen weight needs no gradient
                # In the dtype of the computation, as autograd adds the two if they are one parameter.
                target.copy_(target.to(self.dtype) + source.to(self.dtype))

    def wait(self) -> None:
        """Waits until sent gradients have been received."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _parameters(self) -> tuple[Tensor | None, Tensor | None]:
        if self._weights is None:
            # Once, before the first forward: later the modules' parameters may be the gathered weights.
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


class UnsummedGradient:
    """The gradient of `module`'s gathered weight before FSDP sums it over the data ranks; `module` is a part of `root`,
    the module that FSDP shards.

    In torch up to 2.14, it has the compute dtype, and FSDP accumulates it in a float32 copy over micro-batches. In 2.15
    it seems to be float32 from the start (the parameter's `grad_dtype`), without a copy; this has not run on 2.15.
    """

    def __init__(self, root: nn.Module, module: nn.Module):
        assert is_fsdp(root)
        group = root._get_fsdp_state()._fsdp_param_group
        (self._fsdp_param,) = (p for p in group.fsdp_params if p._module_info.module is module)  # type: ignore[union-attr]

    def empty_like(self) -> Tensor:
        """An uninitialized float32 gradient of this shape."""
        return torch.empty_like(local_values(self._fsdp_param.unsharded_param), dtype=torch.float32)

    @property
    def values(self) -> Tensor | None:
        """This tensor rank's part of the gradient; float32 once FSDP has accumulated it. None if there is none."""
        accumulated = self._fsdp_param.unsharded_accumulated_grad
        grad = self._fsdp_param.unsharded_param.grad if accumulated is None else accumulated
        return None if grad is None else local_values(grad)

    def drop(self) -> None:
        self._fsdp_param.unsharded_param.grad = None
        if self._fsdp_param.unsharded_accumulated_grad is not None:  # in torch 2.15 a read-only property
            self._fsdp_param.unsharded_accumulated_grad = None
