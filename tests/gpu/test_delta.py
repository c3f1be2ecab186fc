"""Gated delta networks on a real GPU. Run: make gpu-test PYTHON=python3."""

import dataclasses

import pytest
import torch

from lockstep import build_model, ops
from lockstep.model import preset
from lockstep.model.config import DeltaNet
from lockstep.ops.delta import delta
from lockstep.ops.delta_cache import paged_delta
from lockstep.ops.delta_reference import CHUNK, differentiable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = [torch.float32, torch.bfloat16]
DEVICE, WIDTH = "cuda", 4
SIZES = [(4, 8, 128, 128), (2, 2, 64, 96), (1, 3, 256, 256)]
"""Heads of keys and of values, and their sizes."""
# One rounding to bfloat16; float32 sums of some hundred terms in another order.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def _randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _inputs(sizes, rows: int, rate: float, dtype) -> list[torch.Tensor]:
    """Neighbors have the same keys and opposite values, so that sums consist of rounding errors."""
    key_heads, heads, key_dim, value_dim = sizes
    channels = 2 * key_heads * key_dim + heads * value_dim
    mixed, conv = _randn(0, rows, channels), _randn(3, channels, WIDTH) * 0.5
    mixed[1::2] = mixed[: rows // 2 * 2 : 2]
    mixed[1::2, 2 * key_heads * key_dim :] *= -1
    conv[:, -1] += 1
    others = (_randn(1, rows, heads), _randn(2, rows, heads), conv, _randn(4, heads) + rate, _randn(5, heads))
    return [x.to(DEVICE, dtype) for x in (mixed, *others)]


def _packed(sizes, inputs, lengths) -> torch.Tensor:
    starts = torch.tensor([0, *lengths], dtype=torch.int32, device=DEVICE).cumsum(0, dtype=torch.int32)
    return delta(*inputs[:3], ops.DeltaTerms(*inputs[3:], sizes[0], sizes[2]), starts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rate", [-8.0, 0.0, 4.0])
@pytest.mark.parametrize("sizes", SIZES)
def test_training_prefill_in_pieces_and_decode_have_the_same_bits(sizes, rate, dtype):
    lengths = [300, 7, 129, 64]
    total = sum(lengths)
    inputs = _inputs(sizes, total + 3, rate, dtype)
    terms = ops.DeltaTerms(*inputs[3:], sizes[0], sizes[2])
    with torch.no_grad():
        whole = _packed(sizes, inputs, lengths)
    assert not whole[total:].any() and whole.isfinite().all()
    first_rows = [sum(lengths[:index]) for index in range(len(lengths))]
    for pieces in ([1], [5], [64, 1], [300], [63, 2, 61, 40]):
        cache = ops.DeltaCache(ops.DeltaSizes(1, *sizes, WIDTH), 8, 4, dtype, DEVICE, drafts=pieces[0] % 2)
        for kept in cache.layer(0):
            kept.fill_(torch.nan)  # what nobody wrote is never used
        done, turn, entries = [0] * len(lengths), 0, [ops.NO_STATE] * len(lengths)
        while unfinished := [i for i, length in enumerate(lengths) if done[i] < length]:
            counts = [min(pieces[(turn + i) % len(pieces)], lengths[i] - done[i]) for i in unfinished]
            now = [done[i] + count for i, count in zip(unfinished, counts)]
            reads = [entries[i] for i in unfinished]
            writes = [2 * i + (entries[i] == 2 * i) for i in unfinished]  # of two entries, the one that is not read
            new, contexts, *places = (
                torch.tensor(column, dtype=torch.int32, device=DEVICE)
                for column in (counts, now, unfinished, reads, writes)
            )
            rows = [first_rows[i] + done[i] + t for i, count in zip(unfinished, counts) for t in range(count)]
            starts = torch.cat((new.new_zeros(1), new.cumsum(0, dtype=torch.int32)))
            padded = (x[[*rows, 0, 0]] for x in inputs[:3])
            out = paged_delta(*padded, terms, 0, ops.DeltaStep(cache, *places), starts, contexts)
            assert torch.equal(out[: len(rows)], whole[rows]), (pieces, done)
            assert not out[len(rows) :].any()
            for i, end, write in zip(unfinished, now, writes):
                entries[i] = write if end // CHUNK > done[i] // CHUNK else entries[i]
                done[i] = end
            turn += 1


def _exact(sizes, inputs, lengths, grad) -> list[torch.Tensor]:
    """The definition's outputs and gradients in float64."""
    leaves = [x.double().requires_grad_() for x in inputs]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        torch.set_default_dtype(torch.float64)
        try:
            sequences = zip(*(x.split(lengths) for x in leaves[:3]))
            terms = ops.DeltaTerms(*leaves[3:], sizes[0], sizes[2])
            out = torch.cat([differentiable(*rows, terms) for rows in sequences])
            return [out, *torch.autograd.grad(out, leaves, grad.double())]
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_outputs_and_gradients_are_close_to_float64_and_the_same_every_time(sizes, dtype):
    lengths = [300, 1, 130, 64]
    inputs = _inputs(sizes, sum(lengths), -4.0, dtype)
    grad = _randn(9, sum(lengths), sizes[1], sizes[3]).to(DEVICE, dtype)

    def run() -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = _packed(sizes, leaves, lengths)
        return [out, *torch.autograd.grad(out, leaves, grad)]

    ours = run()
    for mine, exact in zip(ours, _exact(sizes, inputs, lengths, grad), strict=True):
        error = (mine.double() - exact).abs().max() / exact.abs().max()
        assert error < TOLERANCE[dtype], float(error)
    for _ in range(3):
        assert all(map(torch.equal, run(), ours))


def test_a_decode_step_is_captured_and_replayed():
    sizes, rows = SIZES[0], 70
    inputs = _inputs(sizes, rows, 0.0, torch.bfloat16)
    terms = ops.DeltaTerms(*inputs[3:], sizes[0], sizes[2])
    cache = ops.DeltaCache(ops.DeltaSizes(1, *sizes, WIDTH), 2, 1, torch.bfloat16, DEVICE)
    slots, reads, writes, contexts = torch.tensor([[0], [ops.NO_STATE], [1], [1]], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    new = [x[:1].clone() for x in inputs[:3]]
    with torch.no_grad():
        whole, step = _packed(sizes, inputs, [rows]), ops.DeltaStep(cache, slots, reads, writes)
        paged_delta(*new, terms, 0, step, starts, contexts)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = paged_delta(*new, terms, 0, step, starts, contexts)
        for row in range(rows):
            for target, x in zip(new, inputs):
                target.copy_(x[row : row + 1])
            contexts.fill_(row + 1)
            reads.fill_(1 if row >= CHUNK else ops.NO_STATE)
            graph.replay()
            assert torch.equal(out[0], whole[row]), row


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_hybrid_model_has_the_same_bits_in_training_and_over_a_cache(dtype):
    shape = dict(delta_layers=(True, True, True, False), attention_gate=True)
    config = dataclasses.replace(preset("qwen3:micro"), delta=DeltaNet(2, 4, 16, 32), **shape)
    model, tokens = build_model(config, dtype, device=DEVICE, seed=2), 150
    ids, positions = torch.arange(tokens, device=DEVICE) * 7 % 250, torch.arange(tokens, device=DEVICE)
    whole = model(ids, positions, ops.PackedAttention([tokens], DEVICE))
    whole.float().square().sum().backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters())
    pages = ops.KVCache(1, 10, config.num_kv_heads, config.head_dim, whole.dtype, DEVICE)
    cache = ops.DeltaCache(ops.DeltaSizes(3, 2, 4, 16, 32, WIDTH), 3, 1, whole.dtype, DEVICE)
    table = torch.arange(10, dtype=torch.int32, device=DEVICE)[None]
    cuts = [0, 10, 11, 60, 64, 65, 120, *range(121, tokens + 1)]
    for start, stop in zip(cuts, cuts[1:]):
        numbers = (0, start // CHUNK - 1, stop // CHUNK - 1, stop - start, stop)
        slots, reads, writes, new, contexts = torch.tensor(numbers, dtype=torch.int32, device=DEVICE)[:, None]
        paged = ops.PagedAttention(pages, table, new, contexts, ops.DeltaStep(cache, slots, reads, writes))
        with torch.no_grad():
            out = model(ids[start:stop], positions[start:stop], paged)
        assert torch.equal(out, whole[start:stop]), (start, stop)
