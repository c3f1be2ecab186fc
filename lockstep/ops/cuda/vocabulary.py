"""Log-probabilities over the vocabulary, their gradient, and drawing a token, in Triton.

As on the CPU: each row's vocabulary is reduced in fixed pieces (`piece_bounds`), joined in one binary tree.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.ops.cuda.kernel import kernel, launch
from lockstep.ops.vocabulary import PIECES

BLOCK = 1024


@kernel
def _masses_kernel(logits, inverse_temperatures, bounds, masses, vocab, BLOCK: tl.constexpr):
    """For each piece x of a row: m = max x, Σ e^(x-m) and Σ e^(x-m) x."""
    row, piece = tl.program_id(0), tl.program_id(1)
    base = logits + row.to(tl.int64) * vocab
    inverse = tl.load(inverse_temperatures + row)
    first, last = tl.load(bounds + piece).to(tl.int32), tl.load(bounds + piece + 1).to(tl.int32)
    lane = tl.arange(0, BLOCK)
    tops = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    for start in range(first, last, BLOCK):
        place = start + lane
        x = tl.load(base + place, mask=place < last, other=float("-inf")).to(tl.float32) * inverse
        tops = tl.maximum(tops, x)
    top = tl.max(tops, 0)
    # For a piece without allowed tokens: -inf minus 0 stays -inf.
    shift = tl.where(top == float("-inf"), 0.0, top)
    sums, moments = tl.zeros((BLOCK,), dtype=tl.float32), tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(first, last, BLOCK):
        place = start + lane
        x = tl.load(base + place, mask=place < last, other=float("-inf")).to(tl.float32) * inverse
        weight = tl.exp(x - shift)
        sums += weight
        moments += tl.where(weight > 0, weight * x, 0.0)
    slot = masses + (row * tl.num_programs(1) + piece) * 3
    tl.store(slot, top)
    tl.store(slot + 1, tl.sum(sums, 0))
    tl.store(slot + 2, tl.sum(moments, 0))


@kernel
def _join(m, s, t, COUNT: tl.constexpr):
    """Joins neighboring pairs of `COUNT` masses."""
    m0, m1 = tl.split(tl.reshape(m, (COUNT // 2, 2)))
    s0, s1 = tl.split(tl.reshape(s, (COUNT // 2, 2)))
    t0, t1 = tl.split(tl.reshape(t, (COUNT // 2, 2)))
    top = tl.maximum(m0, m1)
    shift = tl.where(top == float("-inf"), 0.0, top)
    left, right = tl.exp(m0 - shift), tl.exp(m1 - shift)
    return top, s0 * left + s1 * right, t0 * left + t1 * right


@kernel
def _log_probs_kernel(masses, chosen, out, entropies, normalizers, COUNT: tl.constexpr, PIECES: tl.constexpr):
    row = tl.program_id(0)
    piece = tl.arange(0, PIECES)
    slot, exists = masses + (row * COUNT + piece) * 3, piece < COUNT
    m = tl.load(slot, mask=exists, other=float("-inf"))
    s, t = tl.load(slot + 1, mask=exists, other=0.0), tl.load(slot + 2, mask=exists, other=0.0)
    m, s, t = _join(m, s, t, 16)
    m, s, t = _join(m, s, t, 8)
    m, s, t = _join(m, s, t, 4)
    m, s, t = _join(m, s, t, 2)
    top, total, first = tl.sum(m, 0), tl.sum(s, 0), tl.sum(t, 0)  # one element each
    normalizer = top + tl.log(total)
    tl.store(normalizers + row, normalizer)
    tl.store(out + row, tl.load(chosen + row) - normalizer)
    tl.store(entropies + row, normalizer - first / total)


@kernel
def _gradient_kernel(logits, targets, inverse_temperatures, normalizers, grad_out, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    address = logits + row.to(tl.int64) * vocab + place
    inverse = tl.load(inverse_temperatures + row)
    factor = tl.load(grad_out + row) * inverse
    x = tl.load(address, mask=place < vocab, other=0.0).to(tl.float32) * inverse
    p = tl.exp(x - tl.load(normalizers + row))
    gradient = tl.where(place == tl.load(targets + row), factor * (1.0 - p), -factor * p)
    tl.store(address, gradient.to(logits.dtype.element_ty), mask=place < vocab)


@kernel
def _draw_kernel(
    logits, inverse_temperatures, uniforms, bounds, masses, tokens, vocab,
    COUNT: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draws the first token at which the running sum of weights exceeds uniform · total; the likeliest if uniform < 0.

    Stores -1 if its piece is outside of these logits.
    """
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * vocab
    inverse, uniform = tl.load(inverse_temperatures + row), tl.load(uniforms + row)
    index = tl.arange(0, PIECES)
    slot = masses + (row * COUNT + index) * 3
    m = tl.load(slot, mask=index < COUNT, other=float("-inf"))
    top = tl.max(m, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    weights = (tl.load(slot + 1, mask=index < COUNT, other=0.0) * tl.exp(m - shift)).to(tl.float64)
    passed = tl.cumsum(weights, 0)
    wanted = uniform * tl.sum(weights, 0)
    greedy = uniform < 0
    # The piece where the running sum exceeds `wanted`, or that has the maximum; if none does, due to rounding, the last
    # piece with any weight.
    hit = tl.where(greedy, m == top, passed > wanted)
    last_heavy = tl.max(tl.where(weights > 0, index, 0), 0)
    piece = tl.minimum(tl.min(tl.where(hit, index, PIECES), 0), last_heavy)
    before = tl.sum(tl.where(index < piece, weights, 0.0), 0)
    first, last = tl.load(bounds + piece).to(tl.int32), tl.load(bounds + piece + 1).to(tl.int32)
    inside = (first >= 0) & (last <= vocab)
    last = tl.where(inside, last, first)
    lane = tl.arange(0, BLOCK)
    token, heavy = vocab, first
    for start in range(first, last, BLOCK):
        place = start + lane
        x = tl.load(base + place, mask=place < last, other=float("-inf")).to(tl.float32) * inverse
        weight = tl.exp(x - shift).to(tl.float64)
        running = before + tl.cumsum(weight, 0)
        matches = tl.where(greedy, x == top, (running > wanted) & (weight > 0))
        token = tl.minimum(token, tl.min(tl.where(matches, place, vocab), 0))
        heavy = tl.maximum(heavy, tl.max(tl.where(weight > 0, place, first), 0))
        before += tl.sum(weight, 0)
    tl.store(tokens + row, tl.where(inside, tl.where(token < vocab, token, heavy), -1).to(tl.int64))


def masses(logits: Tensor, inverse_temperature: Tensor, bounds: Tensor) -> Tensor:
    """For each row's pieces, m, Σ e^(x-m) and Σ e^(x-m) x, float32 `[rows, pieces, 3]`."""
    logits, inverse_temperature = logits.contiguous(), inverse_temperature.contiguous()
    rows, count = logits.shape[0], len(bounds) - 1
    out = logits.new_empty(rows, count, 3, dtype=torch.float32)
    if rows and count:
        launch(
            _masses_kernel, (rows, count),
            logits, inverse_temperature, bounds, out, logits.shape[1], BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return out


def join_masses(pieces: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of the chosen token, entropy and log of the normalizer of each row, float32."""
    out, entropies, normalizers = (pieces.new_empty(len(pieces)) for _ in range(3))
    if len(pieces):
        launch(
            _log_probs_kernel, (len(pieces),),
            pieces.contiguous(), chosen.contiguous(), out, entropies, normalizers,
            COUNT=pieces.shape[1], PIECES=PIECES, num_warps=1,
        )  # fmt: skip
    return out, entropies, normalizers


def logits_gradient(
    logits: Tensor, targets: Tensor, inverse_temperature: Tensor, normalizers: Tensor, grad: Tensor
) -> Tensor:
    """(onehot - p) / temperature times the incoming gradient; overwrites `logits`."""
    rows, vocab = logits.shape
    if rows:
        launch(
            _gradient_kernel, (rows, triton.cdiv(vocab, BLOCK)),
            logits, targets.contiguous(), inverse_temperature.contiguous(), normalizers.contiguous(),
            grad.contiguous(), vocab, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return logits


def draw(logits: Tensor, inverse_temperature: Tensor, uniform: Tensor, pieces: Tensor, bounds: Tensor) -> Tensor:
    """Inverse transform of `uniform` (float64 in [0, 1); negative: the likeliest). Logits of -inf are never drawn.

    `pieces` are the masses of the whole vocabulary, `bounds` the bounds of its pieces, relative to these logits, which
    may be a part of it: -1 if the token is in another part.
    """
    logits, inverse_temperature = logits.contiguous(), inverse_temperature.contiguous()
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        launch(
            _draw_kernel, (rows,),
            logits, inverse_temperature, uniform.double().contiguous(), bounds, pieces.contiguous(), tokens, vocab,
            COUNT=pieces.shape[1], PIECES=PIECES, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return tokens
