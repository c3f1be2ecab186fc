"""A factor per row: the sigmoid of a logit per token, by which Qwen's mixtures multiply their shared expert."""

from __future__ import annotations

from jaxtyping import Float, Float32
from torch import Tensor

from lockstep.ops import plain
from lockstep.ops.elementary import sigmoid
from lockstep.ops.opaque import Operator, empty_like


def row_gate(logits: Float32[Tensor, "rows 1"], x: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows dim"]:
    """`sigmoid(logits) * x`, computed in float32 and rounded once."""
    out: Tensor = _row_gate(logits, x)
    return out


def _forward(logits: Tensor, x: Tensor) -> Tensor:
    return (sigmoid(logits.detach()) * x.float()).to(x.dtype)


def _gradients(
    grad: Tensor, logits: Tensor, x: Tensor, needed: tuple[bool, bool] = (True, True)
) -> tuple[Tensor, Tensor]:
    """A row's sum is one tree over its features, whatever the other rows."""
    gate, wide = sigmoid(logits.detach()), grad.float()
    along = plain.row_sum(wide * x.float())[:, None]
    return along * (gate * (1 - gate)), (wide * gate).to(x.dtype)


_row_gate = Operator(
    "row_gate(Tensor logits, Tensor x) -> Tensor",
    _forward,
    fake=lambda logits, x: empty_like(x),
    gradients=_gradients,
    kind="activation",
)
