"""The row-invariant matrix product.

Each element is one chain of fused multiply-adds along K in ascending order, for any number of rows: on the CPU a
hand-written product (`native/product.cpp`), in plain PyTorch the same chain step by step (`plain.product`), on NVIDIA
GPUs a fixed order of pieces (`cuda/linear.py`). With several `chunks` of K, each is a separate chain, and their sums
are joined in a binary tree: ranks that each have some of the chunks join them in the same tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32
from torch import Tensor

from lockstep.ops import cuda, native, one_order, plain
from lockstep.ops.forms import FORMS
from lockstep.ops.opaque import Operator
from lockstep.ops.packed_weights import packed


def linear(x: Float[Tensor, "rows in"], weight: Float[Tensor, "out in"], chunks: int = 1) -> Float[Tensor, "rows out"]:
    """`x @ weight.T`, where the bits of a row do not depend on how many other rows there are.

    `chunks`, a power of two: parts of K that are summed separately and then in a binary tree. Another number gives
    different bits.
    """
    if (form := FORMS.get(type(weight))) is not None:
        return form.linear(x, weight, chunks)
    return _linear(x, weight, chunks)


def text_scores(hidden: Float[Tensor, "rows dim"], head: Float[Tensor, "1 dim"]) -> Float32[Tensor, "rows"]:
    """A reward model's score of the text up to each row's token."""
    if (form := FORMS.get(type(head))) is not None:
        scores: Tensor = form.text_scores(hidden, head)
        return scores
    return linear(hidden.float(), head.float())[:, 0]


def product(x: Float[Tensor, "rows in"], weight: Float[Tensor, "out in"], chunks: int = 1) -> Float[Tensor, "rows out"]:
    """`linear` without gradient, for tensors with any strides. Raises ValueError for factors that do not match."""
    return _product(x, weight, chunks, x.dtype, chunks if chunks > 1 else 0)


def product_sums(
    x: Float[Tensor, "rows in"], weight: Float[Tensor, "out in"], chunks: int = 1
) -> Float32[Tensor, "rows out"]:
    """The sums of `product` before rounding to its dtype, for ranks that each have a part of K and add their sums."""
    return _product(x, weight, chunks, torch.float32, chunks)


def _product(x: Tensor, weight: Tensor, chunks: int, dtype: torch.dtype, pieces: int) -> Tensor:
    """pieces: those of K on a GPU; 0: its default."""
    _check_factors(x, weight, chunks)
    if cuda.usable(x):
        from lockstep.ops.cuda import linear

        return linear.product(x, weight, pieces, dtype)
    if native.usable(x):
        panels = None if native.is_pretending() else packed(weight, x.shape[0])
        return native_product(x, weight, panels, chunks, dtype)
    if x.is_meta:
        return F.linear(x, weight).to(dtype)
    cut = zip(x.chunk(chunks, 1), weight.chunk(chunks, 1))
    return tree_sum([plain.product(part, others.T) for part, others in cut]).to(dtype)


def native_product(x: Tensor, weight: Tensor, panels: Tensor | None, chunks: int, dtype: torch.dtype) -> Tensor:
    """The compiled product, rounded to `dtype`: that of `x`, or float32. It only reads the panels if there are any."""
    out = x.new_empty(x.shape[0], weight.shape[0], dtype=dtype)
    name = "product" if dtype == x.dtype else "product_sums"
    sizes = (*x.shape, out.shape[1], chunks)
    native.call(name, x.dtype, x, *x.stride(), weight, *weight.stride(), panels, out, *sizes)
    return out


def _check_factors(x: Tensor, weight: Tensor, chunks: int) -> None:
    """Chunks begin at multiples of 4 bytes, which a bfloat16 product reads at once."""
    if x.shape[1] != weight.shape[1] or x.dtype != weight.dtype or x.device != weight.device:
        raise ValueError(
            f"a product needs factors of one width, dtype and device, but has {list(x.shape)} {x.dtype} on {x.device} "
            f"and {list(weight.shape)} {weight.dtype} on {weight.device}"
        )
    if chunks == 1:
        return
    width = chunks * 4 // x.element_size()
    if chunks < 1 or chunks & (chunks - 1) or x.shape[1] % width:
        raise ValueError(
            f"the {chunks} chunks of a {x.dtype} product must be a power of two, and its {x.shape[1]} features a "
            f"multiple of {width}"
        )


def tree_sum(parts: Sequence[Float32[Tensor, "*shape"]], overwrite: bool = False) -> Float32[Tensor, "*shape"]:
    """The sum of tensors in a binary tree: neighbors first; an odd last one moves up unchanged.

    overwrite: accumulate in the parts' memory. The total of several parts never shares memory with them.
    """
    while len(parts) > 1:
        add = Tensor.add_ if overwrite and len(parts) > 2 else Tensor.add
        parts = [add(left, right) for left, right in zip(parts[::2], parts[1::2])] + [*parts[len(parts) & ~1 :]]
    return parts[0]


def linear_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, chunks: int = 1, needed: tuple[bool, bool] = (True, True)
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `x` and of `weight`, for the product in `chunks` chunks."""
    grad_x = input_gradient(grad, weight, gradient_chunks(grad, chunks)) if needed[0] else None
    return grad_x, token_weight_gradient(grad, x) if needed[1] else None


def gradient_chunks(grad: Tensor, chunks: int) -> int:
    """Number of parts in which the input's gradient is summed. A row product, which has chunks, and a product with one
    output are not split over their outputs."""
    return one_order.gradient_chunks() if chunks == 1 and grad.shape[1] > 1 else 1


def input_gradient(grad: Tensor, weight: Tensor, chunks: int = 1) -> Tensor:
    """Gradient of a product's input: a sum over the outputs, in `chunks` parts."""
    return grad @ weight if by_library(grad) else product(grad, weight.T, chunks)


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient of a product's weight: a sum over all rows."""
    return grad.T @ x if by_library(grad) else product(grad.T, x.T)


def token_weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """`weight_gradient` for rows that are tokens, some of which may be on other ranks (`one_order`)."""
    return shared_weight_gradient(grad, x, one_order.shared_tokens())


def shared_weight_gradient(grad: Tensor, x: Tensor, shared: one_order.SharedRows | None) -> Tensor:
    """`weight_gradient` over all ranks' rows: complete for the outputs that this rank computes, zero for the others."""
    if shared is None:
        return weight_gradient(grad, x)
    part, whole = shared.part(grad.shape[1]), grad.new_zeros(grad.shape[1], x.shape[1])
    grad, x = shared.gather(grad), shared.gather(x)
    whole[part] = weight_gradient(grad[:, part], x)
    return whole


def by_library(grad: Tensor) -> bool:
    """Whether a library computes the gradients' products, with bits that are the library's.

    On a CPU only for pairs or tiles of bfloat16, at the machine's peak: otherwise the native product is as fast or
    faster, and has the same bits on every processor. Never with one order, since a library's bits may depend on the
    number of threads, and on how much of a weight is on this rank.
    """
    if not native.usable(grad):
        return True
    if one_order.is_required():
        return False
    return grad.dtype == torch.bfloat16 and native.arithmetic() != "portable"


# Compiled code calls the product as one operator, so that the compiler cannot change its order of summation.
_linear = Operator(
    "linear(Tensor x, Tensor weight, int chunks) -> Tensor",
    product,
    fake=lambda x, weight, chunks: x.new_empty(x.shape[0], weight.shape[0]),
    gradients=linear_gradients,
    kind="linear",
)
