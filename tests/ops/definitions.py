"""What `bf16_pairs` and `bf16_tiles` are, step by step, as Intel defines their instructions.

A product of two bfloat16 is exact in float32, so that each multiply-add rounds once. What is too small for a normal
float counts as zero, as a factor and as a result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lockstep.ops import BLOCK, Terms, plain
from lockstep.ops.attention_reference import PLAIN

Add = Callable[[Tensor, Tensor, Tensor], Tensor]
TILE_ROWS = 48
"""Query rows of which the gradient's products add up what they have in common, `TILE` of `attention.h`."""


def flushed(x: Tensor) -> Tensor:
    x = x.float()
    return torch.where(x.abs() < 2.0**-126, x * 0.0, x)


def add_pairs(sums: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """sums + x · wᵀ in one chain, of every two elements the second one first (`vdpbf16ps`)."""
    x, w = flushed(x), flushed(w)
    for k in range(0, x.shape[1], 2):
        for i in (k + 1, k):
            if i < x.shape[1]:
                sums = flushed(sums + x[:, i, None] * w[None, :, i])
    return sums


def add_tiles(sums: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """sums + x · wᵀ, of 32 elements the even and the odd ones a chain each, added to each other and to the sum
    (`tdpbf16ps`)."""
    sums = flushed(sums)
    for block, other in zip(flushed(x).split(32, 1), flushed(w).split(32, 1)):
        halves = [torch.zeros_like(sums), torch.zeros_like(sums)]
        for k in range(block.shape[1]):
            halves[k % 2] = flushed(halves[k % 2] + block[:, k, None] * other[None, :, k])
        sums = flushed(sums + flushed(halves[0] + halves[1]))
    return sums


def attention(q: Tensor, k: Tensor, v: Tensor, add: Add, terms: Terms = PLAIN) -> tuple[Tensor, Tensor]:
    """Of one sequence `[tokens, heads or kv_heads, head_dim]`, and the logarithms of the sums of weights."""
    rows, keys, values, sees = _rows(q, k, v)
    scale, before = _float(terms.factor(q.shape[2])), _before(sees, terms)
    outs, log_sums = [], []
    for head, (own, key, value) in enumerate(zip(rows, keys, values)):
        highest, total = torch.full((len(own),), -torch.inf), torch.zeros(len(own))
        if terms.sinks is not None:
            group = q.shape[1] // k.shape[1]
            highest, total = terms.sinks.float()[head * group :][:group].repeat(len(q)), torch.ones(len(own))
        sums = torch.zeros(len(own), q.shape[2])
        for start in range(0, len(key), BLOCK):
            # A block's missing keys have the weight zero: they add nothing.
            scores = add(torch.zeros(len(own), BLOCK), own, _filled(key[start : start + BLOCK], BLOCK)) * scale
            place = torch.arange(start, start + BLOCK)
            hidden = (place >= sees[:, None]) | (place < before[:, None])
            scores, reached = scores.masked_fill(hidden, -torch.inf), ~hidden.all(1)
            following = torch.maximum(highest, scores.amax(1))
            shrink = torch.where(highest == -torch.inf, 0.0, exp(highest - following))
            weights = exp(scores - following[:, None])
            lanes = weights.unflatten(1, (4, 16))
            lanes = (lanes[:, 0] + lanes[:, 1]) + (lanes[:, 2] + lanes[:, 3])
            new_sums = add(sums * shrink[:, None], weights.bfloat16(), _filled(value[start : start + BLOCK], BLOCK).T)
            total = torch.where(reached, total * shrink + plain.row_sum(lanes), total)
            sums = torch.where(reached[:, None], new_sums, sums)
            highest = torch.where(reached, following, highest)
        outs.append((sums * (1.0 / total)[:, None]).bfloat16())
        log_sums.append(highest + _log(total))
    return _tokens(outs, q), _tokens(log_sums, q)


def attention_gradients(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    add: Add,
    at_once: int,
    terms: Terms = PLAIN,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of q, k and v, of one sequence. The products over query rows take `at_once` of them as a step."""
    group, dim = q.shape[1] // k.shape[1], q.shape[2]
    rows, keys, values, sees = _rows(q, k, v)
    grads, outs = (_rows(x, k, v)[0] for x in (grad_out, out))
    sums_of = log_sums.unflatten(1, (k.shape[1], group)).transpose(0, 1).flatten(1)
    before = _before(sees, terms)
    scale, tile = _float(terms.factor(dim)), max(1, TILE_ROWS // group) * group
    grad_q, grad_k, grad_v = [], [], []
    for own, grad, attended, log_sum, key, value in zip(rows, grads, outs, sums_of, keys, values):
        lanes = torch.zeros(len(own), 16)
        for d in range(0, dim, 16):
            lanes = lanes + grad[:, d : d + 16].float() * attended[:, d : d + 16].float()
        delta = plain.row_sum(lanes)
        of_q, of_k, of_v = torch.zeros(len(own), dim), [], []
        for start in range(0, len(key), BLOCK):
            near, near_values = key[start : start + BLOCK], value[start : start + BLOCK]
            count = len(near)
            of_keys, of_values = torch.zeros(count, dim), torch.zeros(count, dim)
            for first in range(0, len(own), tile):
                part = slice(max(first, start * group), min(first + tile, len(own)))
                if part.start >= part.stop:
                    continue
                place = torch.arange(start, start + count)
                hidden = (place >= sees[part, None]) | (place < before[part, None])
                if hidden.all():
                    continue
                nothing = torch.zeros(part.stop - part.start, count)
                scores = plain.multiply_add(add(nothing, own[part], near), scale, -log_sum[part, None])
                weights = exp(scores.masked_fill(hidden, -torch.inf))
                of_scores = weights * (add(nothing, grad[part], near_values) - delta[part, None]) * scale
                weights, of_scores = flushed(weights).bfloat16(), flushed(of_scores).bfloat16()
                of_values = add(of_values, _steps(weights, at_once).T, _steps(grad[part], at_once).T)
                of_keys = add(of_keys, _steps(of_scores, at_once).T, _steps(own[part], at_once).T)
                of_q[part] += add(torch.zeros(part.stop - part.start, dim), of_scores, near.T)
            of_k.append(of_keys)
            of_v.append(of_values)
        grad_q.append(of_q.bfloat16())
        grad_k.append(torch.cat(of_k).bfloat16())
        grad_v.append(torch.cat(of_v).bfloat16())
    return _tokens(grad_q, q), torch.stack(grad_k, 1), torch.stack(grad_v, 1)


def _rows(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The query rows of each head of keys, `[kv_heads, tokens · group, head_dim]`, its keys and values, and how many
    keys each row sees."""
    group = q.shape[1] // k.shape[1]
    rows = q.unflatten(1, (k.shape[1], group)).transpose(0, 1).flatten(1, 2)
    return rows, k.transpose(0, 1), v.transpose(0, 1), torch.arange(1, len(q) + 1).repeat_interleave(group)


def _before(sees: Tensor, terms: Terms) -> Tensor:
    """How many keys lie before each row's window."""
    return (sees - terms.window).clamp(min=0) if terms.window else torch.zeros_like(sees)


def _tokens(rows: list[Tensor], q: Tensor) -> Tensor:
    return torch.stack(rows).unflatten(1, (len(q), -1)).transpose(0, 1).flatten(1, 2)


def _filled(x: Tensor, rows: int) -> Tensor:
    return torch.cat((x, x.new_zeros(rows - len(x), x.shape[1])))


def _steps(x: Tensor, rows: int) -> Tensor:
    return _filled(x, -(-len(x) // rows) * rows)


def _float(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float32)


def exp(x: Tensor) -> Tensor:
    """As `exp` of `vector.h`: x = k ln 2 + r, a polynomial in r, 2^k by the exponent's bits."""
    low, high, magic = _float(-87.0), _float(88.0), _float(12582912.0)
    clamped = torch.where(x < low, low, x)
    clamped = torch.where(high < clamped, high, clamped)
    shifted = plain.multiply_add(clamped, _float(1.44269504088896341), magic)
    k = shifted - magic
    r = plain.multiply_add(k, _float(-0.693359375), clamped)
    r = plain.multiply_add(k, _float(2.12194440e-4), r)
    y = _float(1.9875691500e-4).expand_as(r)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = plain.multiply_add(y, r, _float(c))
    y = plain.multiply_add(y, r * r, r) + 1.0
    y = (y.view(torch.int32) + (shifted.view(torch.int32) << 23)).view(torch.float32)
    return torch.where(x.isnan(), x, torch.where(x < low, 0.0, y))


def _log(x: Tensor) -> Tensor:
    """As `log_float` of `vector.h`, of positive normal numbers: x = 2^e · m with m in [√½, √2)."""
    bits = x.view(torch.int32)
    exponent = (bits - 0x3F3504F3) >> 23
    e, t = exponent.float(), (bits - (exponent << 23)).view(torch.float32) - 1.0
    z, y = t * t, _float(7.0376836292e-2).expand_as(t)
    for c in (-1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
              -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1):  # fmt: skip
        y = plain.multiply_add(y, t, _float(c))
    y = plain.multiply_add(e, _float(-2.12194440e-4), t * z * y)
    y = plain.multiply_add(_float(-0.5), z, y)
    return plain.multiply_add(e, _float(0.693359375), t + y)
