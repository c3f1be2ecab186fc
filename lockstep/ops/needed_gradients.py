"""Which gradients the running backward pass needs: a pipeline may compute those of inputs first, of weights later."""

from __future__ import annotations

from typing import Any

import torch


def needs_gradient(ctx: Any, index: int) -> bool:
    """Whether the running backward pass needs the gradient of an autograd.Function's tensor input `index`.

    `ctx.needs_input_grad` is fixed by the forward and includes gradients that this pass does not compute.
    """
    node = ctx.next_functions[index][0]
    if node is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        # Raised for a leaf whose gradient is returned instead of accumulated.
        return True
