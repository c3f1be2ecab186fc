"""Root-mean-square normalization of rows."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lockstep.ops import cuda, native, one_order, plain
from lockstep.ops.forms import FORMS
from lockstep.ops.opaque import empty_like, library
from lockstep.ops.saved_outputs import saved_output


def rms_norm(
    x: Float[Tensor, "*rows dim"], weight: Float[Tensor, "dim"], eps: float, offset: bool = False
) -> Float[Tensor, "*rows dim"]:
    """`x / sqrt(mean(x²) + eps) * weight`, computed in float32 and rounded once (arXiv 1910.07467).

    offset: multiplies by `1 + weight` instead, as Gemma does.
    """
    if (form := FORMS.get(type(weight))) is not None:
        return form.rms_norm(x, weight, eps, offset)
    if torch.compiler.is_compiling():
        return _opaque(x, weight, eps, offset)[0]
    if not _has_kernels(x):
        return _reference(x, weight, eps, offset)[0]
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return trained_norm(x, weight, eps, offset, None)
    return norm_with_scale(x, weight, eps, offset)[0]


def _has_kernels(x: Tensor) -> bool:
    return native.usable(x) or cuda.usable(x)


def _factors(weight: Tensor, offset: bool) -> Tensor:
    return 1.0 + weight.float() if offset else weight.float()


def _reference(x: Tensor, weight: Tensor, eps: float, offset: bool) -> tuple[Tensor, Tensor]:
    wide = x.float()
    mean = plain.row_sum(wide.square())[..., None] / x.shape[-1]
    scale = 1.0 / torch.sqrt(mean + eps)
    return (wide * scale * _factors(weight, offset)).to(x.dtype), scale[..., 0]


def _reference_gradients(
    grad_out: Tensor, x: Tensor, weight: Tensor, scale: Tensor, offset: bool
) -> tuple[Tensor, Tensor]:
    grad, wide, scale = grad_out.float(), x.float(), scale.view(*x.shape[:-1], 1)
    grad_weight = (grad * wide * scale).flatten(0, -2).sum(0)
    direct = grad * _factors(weight, offset)
    along = (direct * wide).mean(-1, keepdim=True) * scale.square()
    return ((direct - wide * along) * scale).to(x.dtype), grad_weight.to(weight.dtype)


def norm_with_scale(x: Tensor, weight: Tensor, eps: float, offset: bool) -> tuple[Tensor, Tensor]:
    """`rms_norm` without gradient, and each row's scale, float32."""
    if not _has_kernels(x):
        return _reference(x, weight, eps, offset)
    x = x.contiguous()
    if cuda.usable(x):
        from lockstep.ops.cuda import rows

        out, scale = rows.rms_norm(x, weight, eps, offset)
    else:
        out, scale = torch.empty_like(x), torch.empty(x.shape[:-1].numel(), dtype=torch.float32)
        shape = scale.numel(), x.shape[-1]
        native.call("rms_norm", x.dtype, x, weight, out, scale, *shape, float(eps), int(offset))
    return out, scale.view(x.shape[:-1])


def _gradients(grad_out: Tensor, x: Tensor, weight: Tensor, scale: Tensor, offset: bool) -> tuple[Tensor, Tensor]:
    if not _has_kernels(x):
        return _reference_gradients(grad_out, x, weight, scale, offset)
    grad_out, x = grad_out.contiguous(), x.contiguous()
    if cuda.usable(x):
        from lockstep.ops.cuda import rows

        return rows.rms_norm_backward(grad_out, x, weight, scale, offset)
    grad_x, grad_weight = torch.empty_like(x), torch.zeros(x.shape[-1], dtype=torch.float32)
    sizes = scale.numel(), x.shape[-1], int(offset)
    native.call("rms_norm_backward", x.dtype, grad_out, x, weight, scale, grad_x, grad_weight, *sizes)
    return grad_x, grad_weight.to(weight.dtype)


def token_gradients(
    grad_out: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    offset: bool,
    gathered: one_order.GatheredRows | None = None,
) -> tuple[Tensor, Tensor]:
    """`_gradients` when other ranks may have some of the rows: with one order, the first rank computes the weight's."""
    grad_x, grad_weight = _gradients(grad_out, x, weight, scale, offset)
    gathered = gathered or one_order.shared_tokens()
    if gathered is None or not one_order.is_required():
        return grad_x, grad_weight
    grad_out, x, scale = (gathered.gather(part) for part in (grad_out, x, scale.view(x.shape[:-1])))
    return grad_x, _gradients(grad_out, x, weight, scale, offset)[1] if gathered.is_first else torch.zeros_like(weight)


def trained_norm(
    x: Float[Tensor, "*rows dim"],
    weight: Float[Tensor, "dim"],
    eps: float,
    offset: bool,
    gathered: one_order.GatheredRows | None,
) -> Float[Tensor, "*rows dim"]:
    """`rms_norm` of a plain weight, whose gradient is summed over the rows of `gathered`."""
    out: Tensor = _RMSNorm.apply(x, weight, eps, offset, gathered)
    return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: bool, gathered: one_order.GatheredRows | None
    ) -> Tensor:
        x = x.contiguous()
        out, scale = saved_output("norm", lambda: norm_with_scale(x, weight, eps, offset))
        ctx.save_for_backward(x, weight, scale)
        ctx.offset, ctx.gathered = offset, gathered
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, weight, scale = ctx.saved_tensors
        return (*token_gradients(grads[0], x, weight, scale, ctx.offset, ctx.gathered), None, None, None)


# Compiled code calls the norm as one operator: a compiler would choose the order of the sums over rows and columns by
# the number of rows, and recompile for other numbers.
@library.operator(
    "rms_norm(Tensor x, Tensor weight, float eps, bool offset) -> (Tensor, Tensor)",
    fake=lambda x, weight, eps, offset: (empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)),
)
def _opaque(x: Tensor, weight: Tensor, eps: float, offset: bool) -> tuple[Tensor, Tensor]:
    return norm_with_scale(x, weight, eps, offset)


@library.operator(
    "rms_norm_gradients(Tensor grad_out, Tensor x, Tensor weight, Tensor scale, bool offset) -> (Tensor, Tensor)",
    fake=lambda grad_out, x, weight, scale, offset: (empty_like(x), torch.empty_like(weight)),
)
def _opaque_gradients(
    grad_out: Tensor, x: Tensor, weight: Tensor, scale: Tensor, offset: bool
) -> tuple[Tensor, Tensor]:
    return token_gradients(grad_out, x, weight, scale, offset)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])
    ctx.offset = inputs[3]


library.differentiable(
    "rms_norm",
    save=_save,
    backward=lambda ctx, grad, _: (*_opaque_gradients(grad, *ctx.saved_tensors, ctx.offset), None, None),
)
