"""Which gradients a backward pass needs: a pipeline may want those of inputs first and those of weights later."""

from __future__ import annotations

from typing import Any

import torch


def asked_for(ctx: Any, index: int) -> bool:
    """Whether the running backward pass wants the gradient of an autograd.Function's tensor input `index`.

    `ctx.needs_input_grad` only says what could be wanted when the forward ran.
    """
    node = ctx.next_functions[index][0]
    if node is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        # torch's answer for a leaf whose gradient is returned instead of accumulated.
        return True
