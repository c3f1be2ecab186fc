"""Activation checkpointing: a layer saves only its input, and the backward recomputes its forward (arXiv 1604.06174),
or what it computes besides some operators' outputs.

The same forward runs on the same input, so losses and gradients have the same bits as without it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.config import RecomputeConfig
from lockstep.errors import UserError
from lockstep.model import Decoder
from lockstep.model.shard import local_part
from lockstep.ops import native
from lockstep.ops.routes import recorded_routes, repeatable
from lockstep.ops.saved_outputs import SavedOutputs

Forward = Callable[..., Tensor]


def apply_recompute(model: Decoder, config: RecomputeConfig, passes_in_flight: Callable[[], int] = lambda: 1) -> None:
    """Applies activation checkpointing to the layers that `config` selects; inside FSDP, whose hooks gather for both
    passes.

    passes_in_flight: the most forwards through this rank's stages before the backward of the first; the budget is for
    all of them together.
    """
    layers = list(model.layers.named_children())
    budget = Budget(int(config.budget_gib * 2**30), len(layers), passes_in_flight)
    for place, (index, block) in enumerate(layers):
        forward: Forward = block.forward
        if config.mode == "full" or (config.mode == "every" and int(index) % config.every == 0):
            block.forward = partial(_recomputed, forward)
        elif config.mode == "selective":
            block.forward = partial(_selectively_recomputed, forward, config.keep)
        elif config.mode == "offload":
            block.forward = partial(_offloaded, forward)
        elif config.mode == "budget":
            block.forward = partial(_within_budget, forward, budget, place, block)


def _recomputed(forward: Forward, *arguments: Any, **context: Any) -> Tensor:
    if not torch.is_grad_enabled():
        return forward(*arguments)
    # No operator of a layer draws random numbers.
    out: Tensor = checkpoint(repeatable(forward), *arguments, use_reentrant=False, preserve_rng_state=False, **context)
    return out


def _offloaded(forward: Forward, *arguments: Any) -> Tensor:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("layers' inputs go to host memory, which a graph cannot allocate")
    with torch.autograd.graph.saved_tensors_hooks(_to_host, lambda saved: saved[1].to(saved[0], non_blocking=True)):
        return _recomputed(forward, *arguments)


def _to_host(saved: Tensor) -> tuple[torch.device, Tensor]:
    """(the tensor's device, a copy in pinned memory); the rotary tables, which all layers share, stay where they are.

    The copies are in the order of the kernels, so nothing is overwritten before it has been copied.
    """
    host = "meta" if native.is_pretending() else "cpu"  # a dry run counts what is on the device
    return saved.device, saved.to(host, non_blocking=True) if saved.requires_grad else saved


def _selectively_recomputed(forward: Forward, operators: tuple[str, ...], *arguments: Any) -> Tensor:
    return _recomputed(forward, *arguments, context_fn=SavedOutputs(operators).contexts)


def _within_budget(forward: Forward, budget: Budget, place: int, block: nn.Module, *arguments: Any) -> Tensor:
    forward = repeatable(forward)  # measuring runs it several times
    if not torch.is_grad_enabled():
        return forward(*arguments)
    level = budget.level(place, forward, block, arguments)
    if level > len(KEPT):
        return forward(*arguments)
    return _selectively_recomputed(forward, KEPT[level - 1], *arguments) if level else _recomputed(forward, *arguments)


KEPT = ("attention",), ("attention", "linear")
"""What a layer keeps at each level, above nothing and below everything: first what takes the most time for its bytes,
which for attention grows with the context, and for a product is the width that it sums over."""


class Budget:
    """What each layer keeps so that the saved activations fit a number of bytes per rank: a level of `KEPT`.

    All layers reach a level before one reaches the next; the last layers reach it first, since the backward frees what
    they keep before it comes to the others.
    """

    def __init__(self, nbytes: int, num_layers: int, passes_in_flight: Callable[[], int] = lambda: 1):
        self.nbytes = nbytes
        self.num_layers = num_layers
        self.passes_in_flight = passes_in_flight
        self.bytes_per_row: list[float] = []
        """Bytes that a layer saves at each level besides its input, from 1 to everything; measured once, in the first
        forward with a gradient."""

    def level(self, place: int, forward: Forward, block: nn.Module, arguments: tuple[Any, ...]) -> int:
        """How much layer `place` keeps of the rows of `arguments`: 0, a level of `KEPT`, or, one above, everything.

        Raises UserError if the layers' inputs do not fit.
        """
        hidden = local_part(arguments[0])[0]
        rows = hidden.shape[0]
        if not self.bytes_per_row:
            measured = [
                *(kept_bytes(forward, kept, arguments) for kept in KEPT),
                saved_bytes(forward, block, arguments),
            ]
            self.bytes_per_row = [nbytes / rows for nbytes in measured]
        passes = self.passes_in_flight()
        inputs = self.num_layers * hidden.nbytes
        free: float = self.nbytes // passes - inputs
        if free < 0:
            of_all = f", for {passes} micro-batches at once" if passes > 1 else ""
            raise UserError(
                f"recompute.budget_gib {self.nbytes / 2**30:.3g} does not fit the inputs of {self.num_layers} layers"
                f"{of_all}, which are always saved: give at least {passes * inputs / 2**30:.3g}, or lower "
                "train.tokens_per_microbatch"
            )
        before = 0.0
        for level, per_row in enumerate(self.bytes_per_row):
            more = rows * max(per_row - before, 0.0)
            if self.num_layers * more > free:
                return level + (place >= self.num_layers - int(free / more))
            free, before = free - self.num_layers * more, max(per_row, before)
        return len(self.bytes_per_row)


def kept_bytes(forward: Forward, operators: tuple[str, ...], arguments: tuple[Any, ...]) -> int:
    """Bytes of these operators' outputs in one forward pass with a gradient."""
    outputs = SavedOutputs(operators)
    with recorded_routes(), outputs.contexts()[0]:
        forward(*arguments)
    return outputs.nbytes


def saved_bytes(forward: Forward, block: nn.Module, arguments: tuple[Any, ...]) -> int:
    """Bytes that autograd saves in one forward pass, apart from the block's weights and the arguments."""
    tensors = [*block.parameters(), *(a for a in arguments if isinstance(a, Tensor))]
    excluded = {_storage(t).data_ptr() for t in tensors}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = _storage(tensor)
        if storage.data_ptr() not in excluded:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    # A nested recorder: an outer one must not record the routes of this layer twice.
    with recorded_routes(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = forward(*arguments)
    del out  # not earlier: another tensor could get a freed tensor's address
    return sum(saved.values())


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return local_part(tensor.detach())[0].untyped_storage()
