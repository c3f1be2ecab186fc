"""A stage for torch's schedules, with receive buffers only for the micro-batches in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from lockstep import ops
from lockstep.parallel.pipeline_stage import Stage
from lockstep.parallel.tied_embedding import TiedEmbedding

HIDDEN, GRADIENTS = "args_recv_info", "grad_recv_info"
"""torch's tables of receive buffers per micro-batch."""


class TorchStage(PipelineStage):
    """Calls `each`, if set, with the names of its parameters after every micro-batch's backward.

    torch allocates receive buffers for the hidden states and gradients of all of a step's micro-batches. Here, a
    micro-batch's buffers are allocated before it is received, and freed after its backward.
    """

    def __init__(self, tied: TiedEmbedding, stage: Stage, *arguments: Any, **named: Any):
        super().__init__(stage, *arguments, **named)
        self.stage, self.tied = stage, tied
        self.each: Callable[[Iterable[str]], None] | None = None
        self._like: dict[str, list[Tensor | None]] = {}
        """For each direction, meta tensors like the receive buffers of a micro-batch."""

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        self._allocate_buffers(HIDDEN, fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def set_local_fwd_input(self, *arguments: Any, **named: Any) -> None:
        self._free_all_buffers()
        super().set_local_fwd_input(*arguments, **named)

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **named: Any) -> Any:
        self._free_all_buffers()
        with ExitStack() as contexts:
            if (routes := self.stage.routes) is not None:
                routes[fwd_chunk_id] = contexts.enter_context(ops.recorded_routes())
            if (replayed := self.stage.replayed.get(fwd_chunk_id)) is not None:
                contexts.enter_context(ops.replayed_routes(replayed))
            return super().forward_one_chunk(fwd_chunk_id, *arguments, **named)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        if not self.is_last:
            self._allocate_buffers(GRADIENTS, bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _free_all_buffers(self) -> None:
        """Called before the first step receives anything, when torch has allocated all buffers."""
        if self._like:
            return
        for name in (HIDDEN, GRADIENTS):
            buffers = getattr(self, name)
            self._like[name] = [_like(info) for info in buffers.get(0, ())]
            for microbatch in buffers:
                self._free_buffers(name, microbatch)

    def _allocate_buffers(self, name: str, microbatch: int) -> None:
        self._free_all_buffers()
        for info, like in zip(getattr(self, name)[microbatch], self._like[name]):
            if like is not None:
                info.buffer = torch.empty_like(like, device=self.device).requires_grad_(like.requires_grad)

    def _free_buffers(self, name: str, microbatch: int) -> None:
        for info in getattr(self, name).get(microbatch, ()):
            if getattr(info, "buffer", None) is not None:
                info.buffer = None

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **named: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *arguments, **named)
        if named.get("full_backward", True):
            if (loss := named.get("loss")) is not None and not loss._is_view():  # a view cannot be detached
                loss.detach_()  # torch keeps the loss until the step ends; this frees its graph
            self._end(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **named: Any) -> None:
        super().backward_weight_one_chunk(bwd_chunk_id, *arguments, **named)
        self._end(bwd_chunk_id)

    def _end(self, microbatch: int) -> None:
        self._free_buffers(HIDDEN, microbatch)
        self._free_buffers(GRADIENTS, microbatch)
        if self.each is None:
            return
        if isinstance(self.stage, FSDPModule):
            # First convert all gradients to float32: a split backward leaves them in the compute dtype.
            self._reduce(sync=False)
            self.tied.join_gradient(self.stage)
            self._reduce(sync=True)
            self.stage.set_is_last_backward(False)
            self.stage.set_requires_gradient_sync(False)
        # Names, since the stage's parameters are not the sharded ones while weights are gathered.
        names = [*(name for name, _ in self.stage.named_parameters()), *self.stage.extra_parameters]
        self.each([n for n in names if not (self.stage.borrows_embedding and n == "embed_tokens.weight")])

    def _reduce(self, sync: bool) -> None:
        """torch's reduction after a step's last backward, but without resharding: other micro-batches need the
        weights."""
        stage = self.stage
        assert isinstance(stage, FSDPModule)
        unchanged = ["set_reshard_after_backward"] + ([] if sync else ["set_requires_gradient_sync"])
        for setting in unchanged:
            setattr(stage, setting, lambda *_: None)
        try:
            self.perform_reduce_grad(1)
        finally:
            for setting in unchanged:
                delattr(stage, setting)


def _like(info: Any) -> Tensor | None:
    """A meta tensor like the receive buffer; None if there is none."""
    buffer = getattr(info, "buffer", None)
    return None if buffer is None else torch.empty_like(buffer, device="meta").requires_grad_(buffer.requires_grad)
