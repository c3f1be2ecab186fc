"""Gradients of gathered weights before FSDP sums them over the data ranks: the same bits in torch 2.11 to 2.15.

Up to 2.14, a gathered weight's gradient has the compute dtype, and FSDP accumulates it in a float32 copy over
micro-batches. In 2.15 it seems to be float32 from the start (the parameter's `grad_dtype`), without a copy. The code
handles both, but has not run on 2.15 (docs/versions.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UserError
from lockstep.model import Decoder
from lockstep.model.shard import is_fsdp, local_values


def round_tied_gradient(model: Decoder, compute: torch.dtype) -> None:
    """Makes autograd add the gradients of a tied `model`'s embedding and head in `compute`, as in one process.

    If FSDP has set a wider `grad_dtype`, both are converted to it before they are added. That sum, rounded, has the
    bits of a sum in `compute`, which is also computed in float32 and rounded. Call after `fully_shard(model)`, whose
    hook gathers the weights.
    """
    hooked: Tensor | None = None

    def hook(model: nn.Module, arguments: Any) -> None:
        nonlocal hooked
        assert isinstance(model, Decoder)
        weight = model.embed_tokens.weight
        if weight is hooked or not weight.requires_grad:
            return
        if weight.dtype != compute:
            raise _unknown_torch(f"the embedding gathered for a forward is {weight.dtype}, not {compute}")
        weight.register_hook(lambda grad: grad.to(compute).to(grad.dtype))
        hooked = weight

    model.register_forward_pre_hook(hook)


class UnsummedGradient:
    """The gradient of `module`'s gathered weight, where `module` is a part of `root`, the module that FSDP shards."""

    def __init__(self, root: nn.Module, module: nn.Module):
        assert is_fsdp(root)
        try:
            group = root._get_fsdp_state()._fsdp_param_group
            (self._fsdp_param,) = (p for p in group.fsdp_params if p._module_info.module is module)  # type: ignore[union-attr]
            self._fsdp_param.unsharded_accumulated_grad  # noqa: B018  # it must be there
        except (AttributeError, ValueError) as error:
            raise _unknown_torch(str(error)) from error

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


def _unknown_torch(problem: str) -> UserError:
    return UserError(
        f"torch {torch.__version__} stores the gradients of sharded weights in an unsupported way ({problem}), so a "
        "tied embedding's gradient could get other bits; install torch>=2.11,<2.16"
    )
