"""The PyTorch operators that a forward pass may use; a model that uses others is refused.

The invariant operators are compiled kernels, which bypass PyTorch's dispatcher; everything else that creates
floating-point values goes through it. There, a product or reduction of a library may depend on the rest of the batch,
even if no test on this machine shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep import ops
from lockstep.errors import UserError
from lockstep.model.decoder import Decoder

MOVED = {
    "_to_copy", "_unsafe_view", "cat", "clone", "constant_pad_nd", "copy_", "detach", "embedding", "empty",
    "empty_like", "expand", "full", "gather", "index", "index_select", "lift_fresh", "new_empty", "new_full",
    "new_zeros", "scalar_tensor", "select", "slice", "split_with_sizes", "squeeze", "stack", "transpose", "unbind",
    "unsqueeze", "view", "zeros",
}  # fmt: skip
"""Operators that copy values, or create constant ones."""
ELEMENTWISE = {"abs", "add", "ceil", "mul", "reciprocal", "sub", "where"}
"""One rounding each, defined by IEEE 754: an element's place and neighbors do not matter."""
CHOSEN = {"amax", "sort"}
"""The results are input values, whatever the order of comparisons."""


def unknown_operators(call: Callable[[], object]) -> set[str]:
    """The names of PyTorch operators that create floating-point values in a call and are on none of the lists."""
    with _Seen() as seen:
        call()
    return seen.names - MOVED - ELEMENTWISE - CHOSEN


def refuse_unknown_operators(model: Decoder) -> None:
    """Raises UserError, naming them, if a forward pass of `model` uses operators that are on none of the lists.

    Runs a forward of two tokens with the CPU's compiled operators; elsewhere operators are PyTorch's, or Triton's.
    """
    if model.device.type != "cpu" or ops.arithmetic() == "pytorch":
        return
    tokens = torch.arange(2)

    def forward() -> None:
        hidden = model(tokens, tokens, ops.PackedAttention([2]))
        ops.token_log_probs(hidden, model.head_weight, tokens, 0.7, model.head_terms)

    with torch.no_grad():
        unknown = unknown_operators(forward)
    if unknown:
        raise UserError(
            f"the model's forward uses PyTorch's {', '.join(sorted(unknown))}, for which it has not been shown that a "
            "row's bits are the same in any batch; use lockstep.ops instead, or add it to "
            "lockstep/model/known_operators.py with the reason"
        )


class _Seen(TorchDispatchMode):
    """Collects the names of PyTorch operators that create floating-point values."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in this mode: to skip compiled code, PyTorch would import its compiler

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        parts = out if isinstance(out, (tuple, list)) else [out]
        if any(isinstance(part, Tensor) and part.is_floating_point() for part in parts):
            self.names.add(func.overloadpacket.__name__)
        return out
