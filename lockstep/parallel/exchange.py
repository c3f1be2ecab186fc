"""Collectives, sums over ranks in a fixed order, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.ops import one_order
from lockstep.ops.linear import tree_sum
from lockstep.ops.opaque import library
from lockstep.parallel.shared_memory import memory_of

# The names of torch 2.13, which warns about the older ones.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# A global, not a context variable: compiled halves are guarded on it, and exchanges run in one thread. Engines of
# several threads enter it, and leave it in any order.
_whole, _inside, _entering = False, 0, Lock()


@contextmanager
def whole_rows() -> Iterator[None]:
    """Within this context, all ranks of a tensor axis have all rows instead of a share, so their number is arbitrary.

    The bits are the same. Only without gradients.
    """
    global _whole, _inside
    with _entering:
        _inside, _whole = _inside + 1, True
    try:
        yield
    finally:
        with _entering:
            _inside -= 1
            _whole = _inside > 0


@contextmanager
def divided_rows() -> Iterator[None]:
    """Within this context, as outside of `whole_rows`, whatever engines of other threads have entered."""
    global _whole
    _whole = False
    try:
        yield
    finally:
        _whole = _inside > 0


def rows_are_whole() -> bool:
    return _whole


def gather_rows(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The rows of all ranks, in rank order; every rank has the same number."""
    out = local.new_empty(dist.get_world_size(group) * local.shape[0], *local.shape[1:])
    if (memory := memory_of(group, local)) is not None:
        memory.gather(local.contiguous(), out)
    else:
        all_gather(out, local.contiguous(), group=group)
    return out


def swap_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sends equally many rows of `x` to each rank, in rank order; returns what is received, also in rank order."""
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    if (memory := memory_of(group, x)) is not None:
        memory.swap(x.contiguous(), received)
    else:
        dist.all_to_all_single(received, x.contiguous(), group=group)
    return received


@dataclass
class InFlight:
    """Rows that are being sent."""

    received: Tensor
    """Filled when `wait` returns."""
    sent: Tensor
    """Kept alive until it has been received."""
    finish: Callable[[], object]

    def wait(self) -> Tensor:
        self.finish()
        return self.received


def begin_all_to_all(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> InFlight:
    """Starts sending the first `sent[0]` rows to rank 0, and so on; `received[r]` rows come from rank r, in order."""
    out, rows = rows.new_empty(sum(received), rows.shape[1]), rows.contiguous()
    work = dist.all_to_all_single(out, rows, received, sent, group=group, async_op=True)
    return InFlight(out, rows, work.wait)


def sum_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's share of the rows of the sum over ranks, added in a float32 tree and rounded once, or in integers."""
    parts = swap_rows(x, group).unflatten(0, (dist.get_world_size(group), -1))
    parts = parts.float() if x.is_floating_point() else parts
    return tree_sum(parts.unbind(), overwrite=True).to(x.dtype)


def local_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's share of rows that all ranks have."""
    return x.chunk(dist.get_world_size(group))[dist.get_rank(group)]


def sum_gathered(grad: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The gradient of gathered rows: the sum over ranks, which the products have already computed if in one order."""
    return local_rows(grad, group) if one_order.is_required() else sum_rows(grad, group)


def without_gradient(x: Tensor) -> Tensor:
    """`x` with a zero gradient. Not detached, since other ranks take part in its backward pass."""
    x = x.view_as(x)
    if x.requires_grad:
        x.register_hook(torch.zeros_like)
    return x


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, forward: Any, backward: Any) -> Tensor:
        ctx.group, ctx.opposite = group, backward
        out: Tensor = forward(x, group)
        return out.clone() if out._is_view() else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        gradient: Tensor = ctx.opposite(grads[0], ctx.group)
        return gradient, None, None, None


def exchanged(x: Tensor, group: dist.ProcessGroup, forward: Any, backward: Any) -> Tensor:
    """`forward(x, group)`; its gradient is `backward` of the result's gradient."""
    if torch.compiler.is_compiling():
        return (_opaque_gather if forward is gather_rows else _opaque_sum)(x, group.group_name)
    out: Tensor = _Exchange.apply(x, group, forward, backward)
    return out


def group_named(name: str) -> dist.ProcessGroup:
    """A group by name, since operators in a compiled graph take no objects."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]  # its NewType of str


@library.operator(
    "gather_rows(Tensor local, str group) -> Tensor",
    fake=lambda local, group: local.new_empty(local.shape[0] * group_named(group).size(), *local.shape[1:]),
)
def _opaque_gather(local: Tensor, group: str) -> Tensor:
    return gather_rows(local, group_named(group))


@library.operator(
    "sum_rows(Tensor x, str group) -> Tensor",
    fake=lambda x, group: x.new_empty(x.shape[0] // group_named(group).size(), *x.shape[1:]),
)
def _opaque_sum(x: Tensor, group: str) -> Tensor:
    return sum_rows(x, group_named(group))


@library.operator(
    "sum_gathered(Tensor grad, str group) -> Tensor",
    fake=lambda grad, group: grad.new_empty(grad.shape[0] // group_named(group).size(), *grad.shape[1:]),
)
def _opaque_sum_gathered(grad: Tensor, group: str) -> Tensor:
    total = sum_gathered(grad, group_named(group))
    return total.clone() if total._is_view() else total


def _save_group(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group = inputs[1]


library.differentiable("gather_rows", _save_group, lambda ctx, grad: (_opaque_sum_gathered(grad, ctx.group), None))
library.differentiable("sum_rows", _save_group, lambda ctx, grad: (_opaque_gather(grad, ctx.group), None))


class ExchangedSum:
    """A reduce-scatter: an all-to-all, whose parts are added in a binary tree, neighboring ranks first.

    gloo's reduce-scatter is an all-reduce that discards all but one part: 44 ms versus 17 ms for the float32
    gradients of a 7M-parameter layer on two ranks. FSDP uses it through `set_custom_reduce_scatter`.
    """

    def __init__(self, shared: int = 1):
        """shared: how many neighboring ranks share a micro-batch's tokens."""
        self.shared = shared
        self._tree_of_leaves = _MicrobatchTree()

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
            raise ValueError(f"only synchronous sums of gradients are supported here, not {op}, async {async_op}")
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        parts = list(received.view(group.size(), -1).unbind())
        if one_order.is_required() and is_no_subtree(group.size() // self.shared):
            # In one order, only one of the ranks that share tokens has a gradient.
            total = self._tree_of_leaves.add(map(tree_sum, zip(*[iter(parts)] * self.shared)))
            if total is None:
                output_tensor.zero_()
            else:
                output_tensor.copy_(total)
            return
        while len(parts) > 2:
            # Not `torch.sum`, which reads two long rows at a third of the memory bandwidth.
            parts = [left.add_(right) for left, right in zip(parts[::2], parts[1::2])] + parts[len(parts) & ~1 :]
        torch.add(*parts, out=output_tensor)


class SumOverReplicas:
    """An in-place all-reduce of `x`, added in a binary tree, neighboring ranks first.

    FSDP uses it through `set_all_reduce_hook`. The order of a library's all-reduce is not specified.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self._tree_of_leaves = _MicrobatchTree()

    def __call__(self, x: Tensor) -> None:
        ranks = self.group.size()
        padded = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % ranks))
        if one_order.is_required() and is_no_subtree(ranks):
            share = self._tree_of_leaves.add(swap_rows(padded, self.group).view(ranks, -1))
        else:
            share = sum_rows(padded, self.group)
        if share is None:
            x.zero_()
        else:
            x.copy_(gather_rows(share, self.group)[: x.numel()].view_as(x))


def is_no_subtree(ranks: int) -> bool:
    """Whether the sum over so many ranks, of one micro-batch each, is not a subtree of a step's sum."""
    return ranks & (ranks - 1) != 0


class _MicrobatchTree:
    """Sums a step's gradients leaf by leaf, for a number of ranks that is not a power of two.

    A leaf is one rank's micro-batch. The sum is complete after the step's last micro-batch; until then it is None.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._tree: one_order.Tree[Tensor] = one_order.Tree(Tensor.add_)
        self._microbatches = 0

    def add(self, parts: Iterable[Tensor]) -> Tensor | None:
        """Adds a micro-batch of each rank, in rank order; returns the sum of all after the step's last."""
        for part in parts:
            self._tree.add(part.clone())
        self._microbatches += 1
        if self._microbatches < one_order.microbatches():
            return None
        total = self._tree.sum()
        self._begin()
        return total
