"""Collectives by the names that this torch has for them, and FSDP's reduce-scatter on CPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# What torch 2.13 calls them; before, they had the names that it warns of.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ExchangedSum:
    """Every rank sends each other its part, and adds what it receives in the order of the ranks.

    gloo's own reduce-scatter is an all-reduce of which all but one part is thrown away: 44 ms against 17 ms for the
    float32 gradients of a 7M-parameter layer on two ranks. FSDP takes it by `set_custom_reduce_scatter`.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        if op != dist.ReduceOp.SUM or async_op:
            raise ValueError(f"gradients can only be summed here, and waited for; asked for {op}, async {async_op}")
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        first, second, *further = received.view(group.size(), -1).unbind()
        # Not `torch.sum`, which reads two long rows at a third of the memory's speed.
        torch.add(first, second, out=output_tensor)
        for part in further:
            output_tensor.add_(part)
